"""Files that are read while something else takes the time, such as the import of a library.

What is read stays in the system's cache for the reader that follows, and is compared with checksums
on the way. Knows nothing of file contents.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from megatron_ds.fileio.atomic import READ_BYTES, FileRecord

SHARE_OF_MEMORY = 4
"""At most a quarter of the memory is filled with files."""


@contextmanager
def reading(
    files: Sequence[Path], records: Mapping[Path, FileRecord]
) -> Iterator[dict[Path, Future[bool]]]:
    """Reads files in a thread, one after another, until the block ends.

    Args:
        files: Files in the order in which they will be used. Those that are missing, and those that
            exceed a share of the memory, are left to later readers.
        records: Size and checksum of some of them.

    Yields:
        For each of these that is read, whether it matches its checksum, once that is known.
    """
    stop = Event()
    pending: dict[Path, Future[bool]] = {}
    with ThreadPoolExecutor(1) as pool:
        for path in _files_within(_share_of_memory(), files):
            if (record := records.get(path)) is None:
                pool.submit(_read, path, stop.is_set)
            else:
                pending[path] = pool.submit(record.matches, path, stop.is_set)
        try:
            yield pending
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _share_of_memory() -> int:
    """Bytes of files that are read ahead."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SHARE_OF_MEMORY


def _files_within(size: int, files: Sequence[Path]) -> Iterator[Path]:
    """The first files, up to one that is missing or with which they have more bytes."""
    for path in files:
        try:
            size -= path.stat().st_size
        except OSError:
            return
        if size < 0:
            return
        yield path


def _read(path: Path, is_stopped: Callable[[], bool]) -> None:
    block = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while not is_stopped() and file.readinto(block):
            pass
