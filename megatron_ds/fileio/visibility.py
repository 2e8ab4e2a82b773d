"""Waits for what other processes have written to a network file system, which may show it late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
VISIBLE_WITHIN_S = 30.0
"""Time within which a file system shows what another host has written."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 1.0


def retry(look: Callable[[], T], wanted: object) -> T:
    """Calls a function until it returns the wanted value or the time is over.

    Returns:
        What the last call returned.
    """
    end, pause = time.monotonic() + VISIBLE_WITHIN_S, FIRST_PAUSE_S
    while (seen := look()) != wanted and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return seen
