"""Time limits in the syntax of sbatch."""

from __future__ import annotations

import re

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def seconds_of(limit: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; None if `limit` is not a time."""
    match = TIME.fullmatch(limit)
    if match is None:
        return None
    days, *parts = match.groups()
    values = [int(part) for part in parts if part is not None]
    if days is None and len(values) < 3:
        values = [0, *values]  # minutes, or minutes and seconds
    hours, minutes, seconds = (*values, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
