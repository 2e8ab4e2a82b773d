"""Sequential reading of all input documents, with positions from which reading can continue.

Owns opening, decompression, positions and errors that name the file. The formats are defined in
`formats.py`, the selection of files in `inputs.py`. Memory is flat. Knows no tokenizer.
"""

from __future__ import annotations

import itertools
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from megatron_ds.config.problems import UserError, raise_if_any, user_error
from megatron_ds.preprocess.documents.formats import (
    RawDocument,
    Selection,
    arrow_rows,
    csv_rows,
    dataset_rows,
    json_lines,
    parquet_rows,
    plain_text,
)
from megatron_ds.preprocess.documents.inputs import InputSpec, decompress, describe_error, format_of
from megatron_ds.preprocess.documents.signatures import contradictions
from megatron_ds.preprocess.shards import LinesUntil, Shard, Slice, skip_to_line, slices


class ReadPosition(NamedTuple):
    """A position between two documents.

    Attributes:
        file: Number of the file that is being read, from 0.
        line: Line or row of the last document that was read from it; 0 before the first. A shard
            counts the lines of JSON lines from its own first line.
        offset: Byte after that document in files that can be read from the middle, else 0.
    """

    file: int = 0
    line: int = 0
    offset: int = 0


START = ReadPosition()


@dataclass
class DocumentReader:
    """Iterates over the documents of `inputs` in the order of the paths.

    Iterating raises UserError for files that are damaged or lack a column, and OSError for files
    that the system cannot read; both name the file.

    Args:
        inputs: Inputs to read.
        keys: Names of the text fields, see `Selection`.
        after: Where to continue. Files before it are not opened.
        all_columns: Whether tables give all columns, and plain text needs no key.
        shard: The shard to read; None for all documents.

    Attributes:
        lines: Lines that a shard has read of a file whose other lines belong to later shards.
    """

    inputs: InputSpec
    keys: Sequence[str]
    after: ReadPosition = START
    all_columns: bool = False
    shard: Shard | None = None
    lines: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._selection = Selection(self.inputs, tuple(self.keys), self.all_columns)
        self._number = self.after.file
        self._done = 0
        self._tell: Callable[[], int] = int
        self._offset: Callable[[], int] = int

    @property
    def bytes_read(self) -> int:
        """Bytes read of the files as they are stored."""
        return self._done + self._tell()

    def position(self, line: int) -> ReadPosition:
        """Position after the last document, which was on this line."""
        return ReadPosition(self._number, line, self._offset())

    @property
    def end(self) -> ReadPosition:
        """Position after the last file that was read completely."""
        return ReadPosition(self._number)

    def __iter__(self) -> Iterator[RawDocument]:
        if self.inputs.hf_dataset is not None:
            if self.after.file == 0:
                yield from dataset_rows(self.inputs.hf_dataset, self._selection, self.after.line)
            self._number = 1
            return
        for part in slices(self.inputs.files(), self.inputs.format, self.shard):
            source = part.file
            if part.number < self.after.file:
                self._done += (source.size if part.end is None else part.end) - part.begin
                continue
            self._number = part.number
            after = self.after if part.number == self.after.file else START
            with _name_in_errors(source.name), source.open() as file:
                yield from self._read(part, file, after)
            self._tell = int
            self._offset = int
            self._number += 1

    def _read(self, part: Slice, raw: BinaryIO, after: ReadPosition) -> Iterator[RawDocument]:
        size = 0
        if raw.seekable():
            start = raw.tell()  # standard input may have been read before
            size = raw.seek(0, os.SEEK_END)
            raw.seek(start)
            self._tell = raw.tell
        elif part.begin or part.end is not None:
            raise user_error("shard-not-seekable", name=part.file.name)
        self._done -= part.begin
        documents = self._documents(part, raw, size, after)
        if after.line:
            documents = itertools.dropwhile(lambda one: one.line <= after.line, documents)
        yield from documents
        self._done += size if part.end is None else part.end

    def _documents(
        self, part: Slice, raw: BinaryIO, size: int, after: ReadPosition
    ) -> Iterator[RawDocument]:
        name = part.file.name
        format, compression = format_of(name, self.inputs.format)
        selection = self._selection
        if not part.begin:
            raise_if_any(contradictions(name, raw, compression or format))
        if format in ("parquet", "arrow"):
            if compression or not raw.seekable():
                raise user_error("table-not-seekable", name=name, format=format)
            if format == "arrow":
                return arrow_rows(name, raw, selection, after.line)

            def set_progress(fraction: Callable[[], float]) -> None:
                def tell() -> int:
                    return int(size * fraction())

                self._tell = tell

            end = size if part.end is None else part.end
            rows = (part.begin / max(size, 1), end / max(size, 1))
            return parquet_rows(name, raw, selection, after.line, set_progress, rows)
        if format == "jsonl" and not compression and raw.seekable():
            if part.begin and not after.offset:
                skip_to_line(raw, part.begin, part.end)
            raw.seek(max(after.offset, raw.tell()))
            self._offset = raw.tell
            if part.end is not None:
                return self._lines_until(part.end, name, raw, after)
        stream = decompress(raw, compression)
        if compression:
            raise_if_any(contradictions(name, stream, format))
        if format == "jsonl":
            return json_lines(name, stream, selection, after.line if after.offset else 0)
        if format == "text":
            return plain_text(name, stream, selection)
        return csv_rows(name, stream, selection, "," if format == "csv" else "\t")

    def _lines_until(
        self, end: int, name: str, raw: BinaryIO, after: ReadPosition
    ) -> Iterator[RawDocument]:
        before = after.line if after.offset else 0
        stream = LinesUntil(raw, end)
        yield from json_lines(name, stream, self._selection, before)
        self.lines[name] = before + stream.lines


@contextmanager
def _name_in_errors(name: str) -> Iterator[None]:
    """Turns errors of a damaged or inaccessible file into a UserError that names it.

    An OSError that has a file name keeps its type.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries report damage by exceptions of their own types
        if isinstance(error, OSError) and error.filename is not None:
            raise
        if isinstance(error, (EOFError, zlib.error, lzma.LZMAError)):
            reason = f"is damaged or truncated: {error}"
        else:
            reason = f"cannot be read: {describe_error(error)}"
        raise user_error("input-file-unreadable", name=name, reason=reason) from error
