"""Large files that are written around the system's cache (O_DIRECT).

Pages of the cache that are filled, written and dropped again take more time of the processor than
everything else that a large file needs. Knows nothing of file contents.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from megatron_ds.fileio.atomic import start_writeback

BLOCK_BYTES = 2**23
"""Bytes that are written at once, a multiple of the sectors and pages of every disk."""


class DirectFile:
    """A file that is written from front to back, complete blocks of it around the cache.

    The data is copied into memory that is aligned, as O_DIRECT requires. A thread writes a block
    while the next one is filled. The last block, which may have any size, and files of a file
    system without O_DIRECT are written through the cache.

    Attributes:
        size: Bytes of the file, those that are not on the disk yet included.
    """

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: The file. It is created, or continued after its last byte.

        Raises:
            OSError: If it cannot be opened.
        """
        self._file = open(path, "r+b", 0, opener=_open_or_create)  # noqa: SIM115
        self.size = os.fstat(self._file.fileno()).st_size
        self._block = _aligned_memory()
        self._next_block = _aligned_memory()
        begun = self.size % BLOCK_BYTES
        data = os.pread(self._file.fileno(), begun, self.size - begun)
        self._block[:begun] = np.frombuffer(data, np.uint8)
        self._is_direct = self._set_flags(getattr(os, "O_DIRECT", 0))  # absent on macOS
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the file. What `finish` has not written is lost."""
        self._pool.shutdown()
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes.

        Raises:
            OSError: If the disk fails, now or when it wrote a block before.
        """
        unwritten = memoryview(data)
        while len(unwritten) > 0:
            filled = self.size % BLOCK_BYTES
            part = unwritten[: BLOCK_BYTES - filled]
            self._block[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
            self.size += len(part)
            unwritten = unwritten[len(part) :]
            if self.size % BLOCK_BYTES == 0:
                self._wait()
                start = self.size - BLOCK_BYTES
                self._writing = self._pool.submit(self._write_at, self._block.data, start)
                self._block, self._next_block = self._next_block, self._block

    def finish(self) -> None:
        """Writes what is left, and waits until the disk has the file.

        Raises:
            OSError: If the disk fails.
        """
        self._wait()
        self._leave_direct()
        rest = self._block[: self.size % BLOCK_BYTES]
        self._write_at(rest.data, self.size - len(rest))
        os.fsync(self._file.fileno())

    def _wait(self) -> None:
        """Waits for the block before."""
        if self._writing is not None:
            self._writing.result()

    def _write_at(self, unwritten: memoryview, start: int) -> None:
        while len(unwritten) > 0:
            try:
                written = os.pwrite(self._file.fileno(), unwritten, start)
            except OSError as error:
                # A file system may want other sizes; so may the rest of a block that was cut off.
                if not self._is_direct or error.errno != errno.EINVAL:
                    raise
                self._leave_direct()
                continue
            if not self._is_direct:
                start_writeback(self._file, start, written)
            start += written
            unwritten = unwritten[written:]

    def _leave_direct(self) -> None:
        if self._is_direct:
            self._set_flags(0)
            self._is_direct = False

    def _set_flags(self, direct: int) -> bool:
        """Sets or clears O_DIRECT.

        Returns:
            Whether it is set.
        """
        try:
            fcntl.fcntl(self._file.fileno(), fcntl.F_SETFL, direct)
        except OSError:  # the file system has no such access
            return False
        return bool(direct)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def _aligned_memory() -> npt.NDArray[np.uint8]:
    """Memory of a block, at the start of a page."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, BLOCK_BYTES, flags=flags), np.uint8)
