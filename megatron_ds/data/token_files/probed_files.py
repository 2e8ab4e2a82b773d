"""Reads what identifies a file's format: its name, its first bytes, and files next to it.

The same for files of this machine and of a store. A file that cannot be read has no
bytes. Knows no formats.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, Protocol, cast

HEAD_BYTES = 1 << 14
MAX_NAMES = 10_000
"""Most names of a folder that are listed."""


class Files(Protocol):
    """Files by path."""

    def head(self, path: str, size: int = HEAD_BYTES) -> bytes:
        """The first bytes of a regular file, `size` at most; none of anything else."""

    def open(self, path: str) -> BinaryIO:
        """Opens a file that exists.

        Raises:
            OSError: Or an error of a client's own type.
        """

    def size(self, path: str) -> int:
        """Bytes of a regular file; -1 of anything else."""

    def shown(self, path: str) -> str:
        """A path as users write it."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none of anything else."""


class LocalFiles:
    """Files of this machine. Special files, such as pipes, are not opened."""

    def head(self, path: str, size: int = HEAD_BYTES) -> bytes:
        with suppress(OSError):
            if stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "rb") as file:
                    return file.read(size)
        return b""

    def open(self, path: str) -> BinaryIO:
        return open(path, "rb")

    def size(self, path: str) -> int:
        with suppress(OSError):
            status = os.stat(path)
            return status.st_size if stat.S_ISREG(status.st_mode) else -1
        return -1

    def shown(self, path: str) -> str:
        return path

    def names(self, folder: str) -> list[str]:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(MAX_NAMES), strict=False))
        return []


class StoreFiles:
    """Files of an fsspec file system, by its paths. Each answer is requested once.

    Args:
        system: The file system.
    """

    def __init__(self, system: Any) -> None:
        self._system = system
        self._heads: dict[tuple[str, int], bytes] = {}
        self._sizes: dict[str, int] = {}

    def head(self, path: str, size: int = HEAD_BYTES) -> bytes:
        key = path, size
        if key not in self._heads:
            self._heads[key] = b""
            # Suppresses errors of a client's own types. `cat_file` would read the entire file of a
            # web server that ignores ranges.
            with suppress(Exception):
                # obstore's file of an object that does not exist prints an error when it is freed.
                if self._system.exists(path):
                    with self._system.open(path, "rb", block_size=size) as file:
                        self._heads[key] = bytes(file.read(size))
        return self._heads[key]

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, self._system.open(path, "rb"))

    def size(self, path: str) -> int:
        if path not in self._sizes:
            self._sizes[path] = -1
            with suppress(Exception):
                info = self._system.info(path)
                if info["type"] == "file":
                    self._sizes[path] = int(info.get("size") or 0)
        return self._sizes[path]

    def shown(self, path: str) -> str:
        return str(self._system.unstrip_protocol(path))

    def names(self, folder: str) -> list[str]:
        with suppress(Exception):
            listed = self._system.ls(folder, detail=False)
            return sorted(path.rstrip("/").rpartition("/")[2] for path in listed)[:MAX_NAMES]
        return []


@dataclass(frozen=True)
class ProbedFile:
    """A file whose format is to be recognized.

    Args:
        files: Where it is.
        path: Its path there.
    """

    files: Files
    path: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The path of its folder; "" for a name alone."""
        return self.path.rpartition("/")[0]

    @cached_property
    def head(self) -> bytes:
        return self.files.head(self.path)

    @cached_property
    def size(self) -> int:
        return self.files.size(self.path)

    def beside(self, name: str) -> ProbedFile:
        """Another file of the folder."""
        return ProbedFile(self.files, os.path.join(self.folder, name))
