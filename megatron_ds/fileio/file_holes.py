"""Gives the disk space of a part of a file back, which then reads as zeros. Linux only."""

from __future__ import annotations

import ctypes
import os

KEEP_SIZE = 1
"""Flag of fallocate(2)."""
PUNCH_HOLE = 2
"""Flag of fallocate(2)."""


def punch_hole(descriptor: int, start: int, size: int) -> None:
    """Frees the bytes from `start` on; the size of the file does not change.

    Raises:
        OSError: If the file system cannot do that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate(descriptor, KEEP_SIZE | PUNCH_HOLE, start, size):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
