"""How fast a folder's disk is written and read, without the operating system's cache."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

BLOCK = 2**20
BLOCKS = 32
SIZE = BLOCKS * BLOCK
"""Bytes of the file that is written and read."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems without a disk."""


class DiskRate(NamedTuple):
    """Bytes per second of one sequential writer or reader."""

    write: float
    read: float


def measure(folder: Path) -> DiskRate:
    """Write and read a temporary file of 32 MiB as swapping does, around the cache (O_DIRECT).

    Raises:
        OSError: If the folder cannot be written, or has no such access (some network and memory
            file systems).
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".rate-{os.getpid()}"
    block = mmap.mmap(-1, BLOCK)  # aligned, as O_DIRECT requires
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            start = time.perf_counter()
            for _ in range(BLOCKS):
                os.write(file, block)
            os.fsync(file)
            written = time.perf_counter()
            os.lseek(file, 0, os.SEEK_SET)
            for _ in range(BLOCKS):
                os.readv(file, [block])
            end = time.perf_counter()
        finally:
            os.close(file)
    finally:
        path.unlink(missing_ok=True)
        block.close()
    return DiskRate(SIZE / (written - start), SIZE / (end - written))


def is_in_memory(folder: Path) -> bool:
    """Whether an existing folder is on a file system that keeps its files in memory."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False  # not Linux
    path = folder.resolve()
    # Of several mounts on one point, the last one is visible.
    points = [(Path(point), kind) for _, point, kind, *_ in mounts]
    holding = [(len(point.parts), kind) for point, kind in points if path.is_relative_to(point)]
    deepest = max((depth for depth, _ in holding), default=0)
    kinds = [kind for depth, kind in holding if depth == deepest]
    return bool(kinds) and kinds[-1] in IN_MEMORY
