"""Files that are to survive a crash: what is on the disk, and under which name.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Gives its file's name to an error that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from None


def sync(file: BinaryIO) -> None:
    """Bring to the disk what was written to a file. Its name is in what goes wrong."""
    with naming(file.name):
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with naming(os.fspath(folder)):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_read_write(path: str) -> BinaryIO:
    """Opens a file to write over what is there; makes it if it is not."""
    return open(path, "r+b" if os.path.exists(path) else "w+b")


def truncate_to(file: BinaryIO, size: int) -> None:
    """Cuts off what follows after so many bytes, and goes on there. Raises ValueError if there are
    fewer."""
    there = os.fstat(file.fileno()).st_size
    if there < size:
        raise ValueError(
            f"{file.name} has {there} bytes, and {size} were written when the run was interrupted"
        )
    file.truncate(size)
    file.seek(size)


def replace_with(path: str, content: bytes) -> None:
    """Write a file as a whole: at any moment the old one or the new one stands there, also after a
    crash. One process at a time may write a path."""
    new = path + ".new"
    try:
        with naming(new), open(new, "wb") as file:
            file.write(content)
            sync(file)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            os.unlink(new)
        raise
    sync_folder(os.path.dirname(path) or ".")
