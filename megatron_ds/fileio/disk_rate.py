"""How fast a folder's disk is written and read, without the operating system's cache."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path
from typing import NamedTuple

BLOCK = 2**20
BLOCKS = 32


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
    return DiskRate(BLOCKS * BLOCK / (written - start), BLOCKS * BLOCK / (end - written))
