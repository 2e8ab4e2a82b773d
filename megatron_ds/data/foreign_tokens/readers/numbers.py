"""Files that are one array of ids after a header of known size: the base of several formats."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error
from megatron_ds.data.foreign_tokens.foreign_file import (
    BLOCK_BYTES,
    NO_ENDS,
    Block,
    ForeignFile,
)
from megatron_ds.data.token_files.token_file import IntArray

PROBED_BYTES = 1 << 16
"""Bytes at the beginning of a file by which the width of its ids is judged."""
HIGH_HALVES = 32
"""The upper half of an id of 32 bits is below this in vocabularies of two million."""

FileOf = TypeVar("FileOf", bound=ForeignFile)


@dataclass(frozen=True)
class NumberFile:
    """Ids without gaps, little-endian. Implements `ForeignFile`.

    Attributes:
        start: Byte of the first id.
        count: Number of ids.
        ends: [d], number of tokens before the end of each document, ascending; None if the file
            has no documents.
    """

    path: str
    size: int
    dtype: np.dtype[np.generic]
    start: int
    count: int
    ends: IntArray | None = None

    def blocks(self, position: int) -> Iterator[Block]:
        item = self.dtype.itemsize
        step = BLOCK_BYTES // item
        buffer = np.empty(min(step, self.count), self.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.start + position * item)
            while position < self.count:
                tokens = buffer[: min(step, self.count - position)]
                view = tokens.view(np.uint8).data
                read = 0
                while read < len(view):
                    more = file.readinto(view[read:])
                    if not more:
                        raise user_error(
                            "foreign-file-shrank", path=self.path, size=file.tell(), whole=self.size
                        )
                    read += more
                end = position + len(tokens)
                yield Block(tokens, self._ends_in(position, end), end, len(view))
                position = end

    def _ends_in(self, first: int, end: int) -> IntArray:
        """Ends of the documents that end in tokens `first` (exclusive, but 0) to `end`."""
        if self.ends is None:
            return NO_ENDS
        low = int(np.searchsorted(self.ends, first, side="right")) if first else 0
        high = int(np.searchsorted(self.ends, end, side="right"))
        ends: IntArray = np.asarray(self.ends[low:high]).astype(np.int64) - first
        return ends

    def byte_of(self, token: int) -> int | None:
        return self.start + token * self.dtype.itemsize


def looks_wide(path: str, start: int = 0) -> bool:
    """Whether a file read as uint16 begins with ids of 32 bits: every second number is small,
    although those between are not."""
    with open(path, "rb") as file:
        file.seek(start)
        head = file.read(PROBED_BYTES)
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u2")
    high = numbers[1::2]
    return high.size >= 8 and int(high.max()) < HIGH_HALVES and int(numbers[::2].max()) > 255


def file_size(path: str) -> int:
    """Bytes of a file that is not empty.

    Raises:
        UserError: If it is empty, missing or unreadable.
    """
    try:
        size = os.stat(path).st_size
        with open(path, "rb"):
            pass
    except OSError as error:
        raise user_error("token-file-unreadable", path=path, strerror=error.strerror) from error
    if size == 0:
        raise user_error("foreign-file-empty", path=path)
    return size


def mixed_widths(files: Sequence[ForeignFile]) -> Iterator[Problem]:
    """The problem of files whose ids have different types."""
    for file in files:
        if file.dtype != files[0].dtype:
            yield Problem(
                "foreign-types-differ",
                path=file.path,
                dtype=file.dtype,
                first=files[0].path,
                types=files[0].dtype,
            )


def open_each(paths: Sequence[str], open_one: Callable[[str], FileOf]) -> list[FileOf]:
    """Opens files one by one.

    Raises:
        UserError: With the problems of all of them, or if their types differ.
    """
    problems = list[Problem]()
    files = list[FileOf]()
    for path in paths:
        with collect(problems):
            files.append(open_one(path))
    raise_if_any(problems or mixed_widths(files))
    return files
