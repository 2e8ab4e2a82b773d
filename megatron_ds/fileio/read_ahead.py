"""Files that are read while something else takes the time, such as the import of a library.

What is read stays in the system's cache for the reader that follows, and is compared with checksums
on the way. Knows nothing of file contents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

from megatron_ds.fileio.atomic import READ_BYTES, FileRecord

SHARE_OF_MEMORY = 4
"""At most a quarter of the memory is filled with files."""


@contextmanager
def reading(
    files: Sequence[Path], records: Mapping[Path, FileRecord] | None = None
) -> Iterator[set[Path]]:
    """Reads files in a thread until the block ends, and completes the one that it compares then.

    Args:
        files: Files in the order in which they will be used.
        records: Size and checksum of some of them.

    Yields:
        The files that have been found to match their checksums. Errors are left to later readers.
    """
    stop = Event()
    matching: set[Path] = set()

    def read_all() -> None:
        left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE_OF_MEMORY
        for path in files:
            size = path.stat().st_size
            if stop.is_set() or size > left:
                return
            left -= size
            record = None if records is None else records.get(path)
            if record is None:
                _read(path, stop.is_set)
            elif record.matches(path):
                matching.add(path)

    def read_readable() -> None:
        with suppress(OSError):
            read_all()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(read_readable)
        try:
            yield matching
        finally:
            stop.set()


def _read(path: Path, is_stopped: Callable[[], bool]) -> None:
    block = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while not is_stopped() and file.readinto(block):
            pass
