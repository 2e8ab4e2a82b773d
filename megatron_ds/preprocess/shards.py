"""Shards: consecutive ranges of the input's bytes, each read by one process.

A shard depends only on the list of files with their sizes, and on the number of shards, so every
machine finds the same one without asking another. Files of JSON lines are divided at the first line
that begins in a range, parquet files at row groups; other files belong to the shard of their first
byte. Reading itself is defined in `document_readers.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from megatron_ds.config.problems import Problem
from megatron_ds.preprocess.documents.inputs import InputFile, InputSpec, format_of

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Shard:
    """One of `count` shards, with an index from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def shard_problems(inputs: InputSpec) -> Iterator[Problem]:
    """Problems of inputs that several processes cannot read parts of."""
    if inputs.hf_dataset is not None:
        yield Problem("dataset-not-divisible", name=inputs.hf_dataset)
    for path in inputs.unseekable_paths():
        yield Problem("input-not-divisible", path=path)


class Slice(NamedTuple):
    """A file, or a range of its bytes.

    Attributes:
        number: Number of the file in the input, from 0.
        file: The file.
        begin: First byte.
        end: Byte after the last one; None for the end of the file.
    """

    number: int
    file: InputFile
    begin: int = 0
    end: int | None = None

    def count_lines_before(self) -> int:
        """Lines of the file that begin before this slice. Reads the file up to there."""
        if not self.begin:
            return 0
        lines = 1
        left = self.begin - 1
        with self.file.open() as file:
            while left and (block := file.read(min(left, READ_BYTES))):
                lines += block.count(b"\n")
                left -= len(block)
        return lines


def slices(files: Iterable[InputFile], format: str, shard: Shard | None) -> Iterator[Slice]:
    """The files and ranges of a shard, in order; all files without one.

    Args:
        format: Format of all files, or "auto".
    """
    if shard is None:
        yield from (Slice(index, file) for index, file in enumerate(files))
        return
    listed = list(files)
    # One byte more than each file has, so that empty ones belong to a shard, too.
    total = sum(file.size + 1 for file in listed)
    first, last = (total * index // shard.count for index in (shard.index, shard.index + 1))
    start = 0
    for index, file in enumerate(listed):
        begin = max(first - start, 0)
        end = min(last - start, file.size + 1)
        start += file.size + 1
        if begin >= end:
            continue
        if format_of(file.name, format) in (("jsonl", ""), ("parquet", "")):
            yield Slice(index, file, begin, end if end <= file.size else None)
        elif begin == 0:
            yield Slice(index, file)


def lines_before(inputs: InputSpec, shard: Shard | None) -> tuple[str, int]:
    """The first file of a shard, and how many lines of JSON lines earlier shards read of it."""
    first = next(slices(inputs.files(), inputs.format, shard)) if shard else None
    if first is None or format_of(first.file.name, inputs.format)[0] != "jsonl":
        return "", 0
    return first.file.name, first.count_lines_before()


class LinesUntil:
    """The lines of an open file that begin before a byte, for `readline` only.

    Args:
        file: An uncompressed file, at the beginning of a line.
        end: The byte.

    Attributes:
        lines: Number of lines that were begun.
    """

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file = file
        self._end = end
        self._is_inside = False
        self.lines = 0

    def readline(self, limit: int) -> bytes:
        if not self._is_inside and self._file.tell() >= self._end:
            return b""
        line = self._file.readline(limit)
        self.lines += bool(line) and not self._is_inside
        self._is_inside = not line.endswith(b"\n")
        return line


def skip_to_line(file: BinaryIO, begin: int, end: int | None) -> None:
    """Move to the first line that begins at this byte or after it, but not far beyond the end."""
    file.seek(begin - 1)
    while line := file.readline(READ_BYTES):
        if line.endswith(b"\n") or file.tell() >= (end or math.inf):
            return
