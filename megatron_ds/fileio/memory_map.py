"""Files as arrays in memory, without an open descriptor for each.

`mmap.mmap` and `np.memmap` keep one open as long as they live, and a mixture of a thousand files,
each of a pair with three indexes, would need more than most systems let a process have.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import numpy.typing as npt


def map_file(file: IO[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of an open file, read-only and shared with all who map it; they stay when the file
    is closed. Raises OSError if the system cannot map it.

    A plain array: slices of np.memmap are slow to make.
    """
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        return np.zeros(0, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return np.asarray(_UnmapOnRelease(address, size, libc.munmap))


class _UnmapOnRelease:
    """What an array over mapped memory holds on to; the memory goes with the last of them."""

    def __init__(self, address: int, size: int, unmap: Callable[[int, int], int]) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # read-only
            "typestr": "|u1",
            "shape": (size,),
        }
        # At the end of the process, arrays may still be looked at: the system does it.
        weakref.finalize(self, unmap, address, size).atexit = False
