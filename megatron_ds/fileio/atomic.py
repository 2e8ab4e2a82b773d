"""Durable file operations: atomic replacement, fsync and errors that name the file.

Owns the sequence write, fsync, rename, fsync of the folder. Knows nothing of file contents.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from megatron_ds.fileio.visibility import retry_stale

StrPath = str | os.PathLike[str]
SHA256_LENGTH = 64
READ_BYTES = 2**24
"""Bytes that are read at once: so many that threads rarely wait for the interpreter's lock while
another one imports libraries."""
READERS = 3
"""Reads of a file that are in progress at once; disks are faster than with one."""


class FileRecord(NamedTuple):
    """Size and checksum of a file, as its writer knows them."""

    size: int
    checksum: str
    """XXH3 of 128 bits, in hexadecimal. It detects damage at the speed of the memory, while SHA-256
    is slower than many disks; neither is a signature. Older records have SHA-256."""

    @classmethod
    def of(cls, content: bytes) -> FileRecord:
        return cls(len(content), xxhash.xxh3_128_hexdigest(content))

    @property
    def algorithm(self) -> str:
        return "sha256" if len(self.checksum) == SHA256_LENGTH else "xxh3_128"

    def matches(self, path: StrPath, is_stopped: Callable[[], bool] | None = None) -> bool:
        """Whether a file has this size and checksum.

        Args:
            path: The file.
            is_stopped: Whether to end early, with any result. None: never.
        """
        digest = hashlib.sha256() if self.algorithm == "sha256" else new_checksum()
        record = retry_stale(lambda: _read_checksum(path, digest.copy(), is_stopped))
        return record == tuple(self)


@contextmanager
def name_in_errors(path: StrPath) -> Iterator[None]:
    """Adds the path to an OSError that has none, such as "No space left on device" of a write."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def start_writeback(file: FileIO, start: int, size: int) -> None:
    """Let the system write part of a file to the disk now, while more of it is produced.

    By default it waits for the first seconds' worth of writes or for an fsync, which then waits for
    all of the file. Only the fsync reports errors.
    """
    if hasattr(os, "posix_fadvise"):  # absent on macOS
        # Linux writes what is dirty in the range, and keeps it in memory until that is done.
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


def fsync_file(file: BinaryIO) -> None:
    """Flush a file and wait until the disk has it.

    Raises:
        OSError: With the name of the file.
    """
    with name_in_errors(file.name):
        file.flush()
        os.fsync(file.fileno())


def fsync_path(path: StrPath) -> None:
    """Wait until the disk has a closed file, or the entries (renames) of a folder.

    Raises:
        OSError: With the path.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: StrPath, target: StrPath) -> None:
    """Rename a file or folder, and replace a file of the new name.

    If the answer to a rename is lost, an NFS client repeats the request. The server may then reply
    that there is no such source, although it has renamed it.

    Raises:
        OSError: If nothing was renamed.
    """
    before = os.lstat(source)
    try:
        os.replace(source, target)
    except FileNotFoundError:
        if not os.path.lexists(target) or not os.path.samestat(before, os.lstat(target)):
            raise


@contextmanager
def atomic_write(
    path: StrPath, *, temporary: StrPath | None = None, fsync_folder: bool = True
) -> Iterator[BinaryIO]:
    """Replace a file atomically: after a crash it has either the old or the new content.

    Args:
        path: The file to replace or create.
        temporary: Path to write first, in the same folder. The default allows one writer at a time.
        fsync_folder: Whether the rename is durable on return. Callers that write several files may
            instead fsync the folder once.

    Yields:
        The new file. An error inside the block leaves the old file as it was.
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.partial") if temporary is None else Path(temporary)
    try:
        with name_in_errors(path):
            with open(new, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            rename(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    if fsync_folder:
        fsync_path(path.parent)


def write_atomically(
    path: StrPath, content: bytes, confirm: Callable[[], object] | None = None
) -> FileRecord:
    """Replace a file atomically and durably by this content.

    Args:
        path: The file to replace or create.
        content: The new content.
        confirm: Called when only the rename is left to do. Its error leaves the old file as it was.
    """
    with atomic_write(path) as file:
        file.write(content)
        if confirm is not None:
            fsync_file(file)  # which may take long
            confirm()
    return FileRecord.of(content)


def new_checksum() -> xxhash.xxh3_128:
    """Computes the checksum of a `FileRecord` from the parts of a file."""
    return xxhash.xxh3_128()


def _read_checksum(
    path: StrPath, digest: Any, is_stopped: Callable[[], bool] | None
) -> tuple[int, str]:
    """Size and checksum of a file, or of its beginning."""
    size = 0
    with name_in_errors(path), open(path, "rb", buffering=0) as file:
        for block in _read_blocks(file):
            if is_stopped is not None and is_stopped():
                break
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def _read_blocks(file: FileIO) -> Iterator[memoryview]:
    """Reads a file from front to back.

    Yields:
        Consecutive parts. Each is valid until the next one is taken.
    """
    size = os.fstat(file.fileno()).st_size
    if size > READ_BYTES and hasattr(os, "preadv"):  # absent on Windows
        yield from _read_ahead(file, size)
        file.seek(size)
    block = memoryview(bytearray(min(size, READ_BYTES) + 1))
    while count := file.readinto(block):
        yield block[:count]


def _read_ahead(file: FileIO, size: int) -> Iterator[memoryview]:
    """Reads this many bytes of a file in several threads; otherwise like `_read_blocks`."""
    blocks = deque(memoryview(bytearray(READ_BYTES)) for _ in range(READERS + 1))
    pending: deque[tuple[memoryview, Future[int]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, size, READ_BYTES):
            block = blocks.popleft()[: size - start]
            pending.append((block, pool.submit(_read_at, file, block, start)))
            if len(pending) <= READERS:
                continue
            block, read = pending.popleft()
            yield block[: read.result()]
            blocks.append(block)
        for block, read in pending:
            yield block[: read.result()]


def _read_at(file: FileIO, block: memoryview, start: int) -> int:
    """Fills a block with the bytes of a file from `start` on; returns how many there are."""
    count = 0
    while count < len(block):
        more = os.preadv(file.fileno(), [block[count:]], start + count)
        if more == 0:
            break
        count += more
    return count


def sha256_of(path: StrPath) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
