"""Reads what other hosts write to a network file system, which may show it late or replace it."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
VISIBLE_WITHIN_S = 30.0
"""Time within which a file system shows what another host has written."""
FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 1.0
STALE_ATTEMPTS = 5


def retry(look: Callable[[], T], wanted: object) -> T:
    """Calls a function until it returns the wanted value or the time is over.

    Returns:
        The result of the last call.
    """
    end = time.monotonic() + VISIBLE_WITHIN_S
    pause = FIRST_PAUSE_S
    while (seen := look()) != wanted and time.monotonic() < end:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return seen


def retry_stale(read: Callable[[], T]) -> T:
    """Calls a function that opens and reads files, again if NFS reports a stale handle.

    That happens if another host replaces or deletes a file which this one has open or remembers.
    Opened again, the name gives the new file.
    """
    for attempt in range(STALE_ATTEMPTS):
        try:
            return read()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(FIRST_PAUSE_S * 2**attempt)
    return read()
