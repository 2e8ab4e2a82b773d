"""Where the seconds go between the start of a process and the end of its first iteration.

Knows neither what is started nor torch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartupTimer:
    """The parts of a start, each measured from the end of the one before it."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._parts: list[tuple[str, float]] = [("interpreter", process_age())]

    def mark(self, part: str) -> None:
        """Notes that a part has just ended."""
        now = time.monotonic()
        self._parts.append((part, now - self._last))
        self._last = now

    @property
    def parts(self) -> list[tuple[str, float]]:
        """Names and seconds, in order."""
        return list(self._parts)

    def summary_line(self) -> str:
        """One line for the log."""
        fields = [f" {name}: {seconds:.2f} |" for name, seconds in self._parts]
        total = sum(seconds for _, seconds in self._parts)
        return f"start-up (s) |{''.join(fields)} all: {total:.2f} |"


def process_age() -> float:
    """Seconds since the system started this process; 0 where it does not say (no /proc)."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, field 22
    return max(0.0, uptime - started)
