"""Measures by regular polls how long this process did not run, as while it was suspended."""

from __future__ import annotations

import time


class PollClock:
    """The time between the polls of this process, which are half a second apart while it runs."""

    def __init__(self) -> None:
        self._polled_at = time.monotonic()
        self._longest_s = 0.0

    def poll(self) -> float:
        """Ends an interval between two polls; returns its seconds."""
        now = time.monotonic()
        interval_s = now - self._polled_at
        self._longest_s = max(self._longest_s, interval_s)
        self._polled_at = now
        return interval_s

    @property
    def longest_s(self) -> float:
        """Seconds of the longest interval, of which the last one may not have ended."""
        return max(self._longest_s, time.monotonic() - self._polled_at)
