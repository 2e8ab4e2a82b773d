"""Memory-mapped files as arrays, without an open descriptor for each.

`mmap.mmap` and `np.memmap` keep a descriptor open as long as they live; a blend of a thousand
sources, with a pair of files and three indexes each, would exceed the limit of most systems.
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


def map_file(file: IO[Any], *, writable: bool = False) -> npt.NDArray[np.uint8]:
    """Map an open file, shared with other processes. The mapping outlives the open file.

    Args:
        file: The file, open for reading, and for writing if `writable`.
        writable: Whether the array may be changed, and the file with it.

    Returns:
        [size] bytes, as a plain array, since slicing np.memmap is slow.

    Raises:
        OSError: If the system cannot map the file.
    """
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        return np.zeros(0, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = libc.mmap(None, size, access, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return np.asarray(_MappedMemory(address, size, writable, libc.munmap))


class _MappedMemory:
    """Base object of arrays over a mapped file; unmaps when the last of them is deleted."""

    def __init__(
        self, address: int, size: int, writable: bool, unmap: Callable[[int, int], int]
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, not writable),
            "typestr": "|u1",
            "shape": (size,),
        }
        # At exit, arrays may still be in use; the system unmaps then.
        weakref.finalize(self, unmap, address, size).atexit = False
