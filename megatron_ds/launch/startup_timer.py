"""Startup timing, from process start to the end of the first iteration. Imports no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartupTimer:
    """Durations of the consecutive phases of start-up.

    Args:
        is_guest: Whether the process has done something else before.
    """

    def __init__(self, *, is_guest: bool = False) -> None:
        self._last = time.monotonic()
        age = [] if is_guest else [("interpreter", process_age())]
        self.phases: list[tuple[str, float]] = age
        """Names and seconds, in order."""

    def mark(self, phase: str) -> None:
        """Records the end of a phase, which began at the end of the previous one."""
        now = time.monotonic()
        self.phases.append((phase, now - self._last))
        self._last = now

    def summary_line(self, is_short: bool = False) -> str:
        """One line for the log; the short one has the sum only."""
        fields = [f" {name}: {seconds:.2f} |" for name, seconds in self.phases]
        total = sum(seconds for _, seconds in self.phases)
        if is_short:
            return f" start-up with the first iteration took {total:.1f} s"
        return f"start-up (s) |{''.join(fields)} all: {total:.2f} |"


def process_age() -> float:
    """Seconds since this process was started; 0 without /proc."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime, field 22
    return max(0.0, uptime - started)
