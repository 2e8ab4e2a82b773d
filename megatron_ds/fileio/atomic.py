"""Durable file operations: atomic replacement, fsync and errors that name the file.

Owns the sequence write, fsync, rename, fsync of the folder. Knows nothing of file contents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

StrPath = str | os.PathLike[str]


class FileRecord(NamedTuple):
    """Size and SHA-256 (hexadecimal) of a file, as its writer knows them."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> FileRecord:
        return cls(len(content), hashlib.sha256(content).hexdigest())


@contextmanager
def name_in_errors(path: StrPath) -> Iterator[None]:
    """Adds the path to an OSError that has none, such as "No space left on device" of a write."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


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
            os.replace(new, path)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    if fsync_folder:
        fsync_path(path.parent)


def write_atomically(path: StrPath, content: bytes) -> FileRecord:
    """Replace a file atomically and durably by this content."""
    with atomic_write(path) as file:
        file.write(content)
    return FileRecord.of(content)


def sha256_of(path: StrPath) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
