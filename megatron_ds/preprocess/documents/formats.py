"""Readers of the input formats: JSON lines, plain text, CSV, parquet, arrow and HF data sets.

Each turns one open file into raw documents with line or row numbers, in flat memory. Knows no
files' names beyond messages, and leaves the content of a JSON line to the workers, which parse it.
pyarrow and datasets are imported only for inputs that need them.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, Protocol, TextIO

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import option, user_error
from megatron_ds.data.token_files.text_columns import (
    Columns,
    columns_of_object,
    columns_of_schema,
)
from megatron_ds.preprocess.documents.inputs import InputSpec, describe_error

ROWS = 128
"""Rows of a table that are converted together."""
STRING_TYPES = ("string", "large_string", "string_view")
"""Types of a table's text columns."""
ID_NAMES = frozenset(("input_ids", "token_ids", "tokens", "ids"))
"""Keys by which programs write token ids."""
PREVIEW_BYTES = 1000
"""Bytes of a too long document that are kept for the list of rejected documents."""

BROKEN_ROW = "broken row"
INVALID_TEXT = "invalid UTF-8"
TOO_LONG = "too long"


class UnreadableDocument(NamedTuple):
    """A line or row that holds no document.

    Attributes:
        reason: Category, by which rejected documents are counted.
        message: Description of the error.
        content: The line or row, possibly truncated.
    """

    reason: str
    message: str
    content: str


class RawDocument(NamedTuple):
    """One document as read.

    Attributes:
        file: Name of the file.
        line: Its first line, or its row, from 1.
        value: An unparsed JSON line, or fields by name.
    """

    file: str
    line: int
    value: bytes | dict[str, Any] | UnreadableDocument


@dataclass(frozen=True)
class Selection:
    """The fields that readers extract.

    Attributes:
        inputs: Format options and the size limit.
        keys: Names of the text fields; `a.b` is the column `a.b`, or the field b of column `a`.
        all_columns: Whether tables give all columns, and plain text needs no key.
    """

    inputs: InputSpec
    keys: tuple[str, ...]
    all_columns: bool = False

    @property
    def limit(self) -> int:
        return self.inputs.max_document_bytes

    def columns(self, name: str, names: Sequence[str], types: Columns) -> list[str]:
        """The columns to read.

        Args:
            name: Name of the file.
            names: Names of all columns.
            types: Columns with text and columns with token ids.

        Raises:
            UserError: If the column of a key is missing or ambiguous, or holds token ids.
        """
        columns: list[str] = []
        for key in self.keys:
            column = next((part for part in (key, key.split(".")[0]) if part in names), None)
            if column is None:
                self.reject_ids(name, types, is_missing=True)
                shown = ", ".join(map(repr, types.text or names))
                remedy = f"text is in {shown}: choose it with {option('json_keys')}"
                if not types.text:
                    remedy = f"none of the columns is text: {shown}"
                raise user_error("column-missing", name=name, key=key, remedy=remedy)
            if (count := names.count(column)) > 1:
                raise user_error("column-not-unique", name=name, count=count, column=column)
            columns.append(column)
        self.reject_ids(name, types)
        return list(names) if self.all_columns else list(dict.fromkeys(columns))

    def reject_ids(self, name: str, types: Columns, *, is_missing: bool = False) -> None:
        """Refuses token ids in place of text.

        Args:
            name: Name of the file.
            types: Columns with text and columns with token ids.
            is_missing: Whether there is no column of a key.

        Raises:
            UserError: If the column of a key holds token ids, or if a key is missing and there are
                token ids and no text.
        """
        ids = [key for key in self.keys if key in types.ids]
        if is_missing and not types.text:
            ids += types.ids
        if ids:
            text = ", ".join(map(repr, types.text))
            remedy = "they are not read: give the text that they were made from"
            if types.text:
                remedy = f"text is in {text}: choose it with {option('json_keys')}"
            shown = ", ".join(map(repr, ids))
            raise user_error("column-of-ids", name=name, columns=shown, remedy=remedy)

    def text_key(self, name: str) -> str:
        """The field that plain text is.

        Raises:
            UserError: If there are several keys.
        """
        if self.all_columns and not self.keys:
            return "text"
        if len(self.keys) != 1:
            raise user_error("plain-text-needs-one-key", name=name)
        return self.keys[0]

    def too_long(self, unit: str, head: bytes) -> UnreadableDocument:
        message = f"the {unit} is longer than {self.limit} bytes, the maximum document size"
        if unit == "file":
            message += "; its paragraphs can be read as documents instead"
        return UnreadableDocument(TOO_LONG, message, decode(head))


class LineFile(Protocol):
    """A file of lines."""

    def readline(self, limit: int, /) -> bytes: ...


def json_lines(
    name: str, file: LineFile, selection: Selection, lines_before: int
) -> Iterator[RawDocument]:
    """Unparsed lines.

    Args:
        lines_before: Lines of the file before the current position.
    """
    lines = enumerate(_lines(file, selection.limit), lines_before + 1)
    is_first = True
    for line_number, (line, complete) in lines:
        if not complete:
            yield RawDocument(name, line_number, selection.too_long("line", line))
        elif not line.isspace():
            if is_first:
                _reject_ids_in_line(name, line, selection)
            is_first = False
            yield RawDocument(name, line_number, line)


def _reject_ids_in_line(name: str, line: bytes, selection: Selection) -> None:
    """Refuses a file whose first line has token ids instead of text.

    Raises:
        UserError: If it has.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return  # reported when the line is parsed
    if isinstance(value, dict):
        is_missing = any(key.split(".")[0] not in value for key in selection.keys)
        # The first line may lack a key that others have.
        is_table_of_ids = not ID_NAMES.isdisjoint(value)
        types = columns_of_object(value)
        selection.reject_ids(name, types, is_missing=is_missing and is_table_of_ids)


def _lines(file: LineFile, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Lines with their ends and True; of a too long line its beginning and False."""
    while line := file.readline(limit + 1):
        if len(line) <= limit or line.endswith(b"\n"):
            yield line, True
            continue
        head = line[:PREVIEW_BYTES]
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        yield head, False


def plain_text(name: str, file: BinaryIO, selection: Selection) -> Iterator[RawDocument]:
    """The entire file as a document, or each paragraph."""
    key = selection.text_key(name)
    limit = selection.limit
    lines = _lines(file, limit)
    first, complete = next(lines, (b"", True))
    if selection.inputs.format == "auto" and _is_object(first):
        raise user_error("text-file-holds-json-lines", name=name)
    first = first.removeprefix(b"\xef\xbb\xbf")
    if selection.inputs.text_document_unit == "paragraph":
        yield from _paragraphs(name, key, itertools.chain([(first, complete)], lines), selection)
        return
    content = first + file.read(max(0, limit + 1 - len(first)))
    if complete and len(content) <= limit:
        yield RawDocument(name, 1, {key: decode(content)})
    else:
        yield RawDocument(name, 1, selection.too_long("file", content[:PREVIEW_BYTES]))


def _paragraphs(
    name: str, key: str, lines: Iterable[tuple[bytes, bool]], selection: Selection
) -> Iterator[RawDocument]:
    groups = itertools.groupby(enumerate(lines, 1), lambda one: one[1][1] and one[1][0].isspace())
    for is_blank, numbered in groups:
        if is_blank:
            continue
        paragraph: list[bytes] = []
        size = 0
        start = 0
        fits = True
        for line_number, (line, complete) in numbered:
            start = start or line_number
            size += len(line)
            fits = fits and complete and size <= selection.limit
            if fits or not paragraph:
                paragraph.append(line)
        content = b"".join(paragraph)
        if fits:
            yield RawDocument(name, start, {key: decode(content).rstrip("\r\n")})
        else:
            head = content[:PREVIEW_BYTES]
            yield RawDocument(name, start, selection.too_long("paragraph", head))


def csv_rows(
    name: str, file: BinaryIO, selection: Selection, delimiter: str
) -> Iterator[RawDocument]:
    """Rows by the column names of the first line. Leaves the file open."""
    csv.field_size_limit(selection.limit)
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    try:
        lines = _CsvLines(text, selection.limit)
        rows = csv.reader(lines, delimiter=delimiter)
        try:
            header = next(rows, None)
        except csv.Error as error:
            raise user_error("csv-header-broken", name=name, error=error) from error
        if header is None:
            return
        selection.columns(name, header, Columns(tuple(header), ()))
        while True:
            line = lines.number + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                message = f"is not a CSV row: {error}"
                yield RawDocument(name, line, UnreadableDocument(BROKEN_ROW, message, ""))
                continue
            if row is None:
                return
            if row and len(row) != len(header):
                message = f"has {len(row)} fields; the first line names {len(header)} columns"
                unreadable = UnreadableDocument(BROKEN_ROW, message, json.dumps(row))
                yield RawDocument(name, line, unreadable)
            elif row:
                yield RawDocument(name, line, dict(zip(header, row, strict=True)))
    finally:
        text.detach()  # otherwise the wrapper closes the caller's file


class _CsvLines:
    """Lines of a text; raises csv.Error for a too long line and can be continued after it.

    A generator could not be continued after an exception.
    """

    def __init__(self, text: TextIO, limit: int) -> None:
        self._text = text
        self._limit = limit
        self.number = 0

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._limit + 1)
        if not line:
            raise StopIteration
        self.number += 1
        if len(line) <= self._limit or line.endswith(("\r", "\n")):
            return line
        while line and not line.endswith(("\r", "\n")):
            line = self._text.readline(1 << 20)
        raise csv.Error(f"the line is longer than {self._limit} characters")


def parquet_rows(
    name: str,
    file: BinaryIO,
    selection: Selection,
    skip: int,
    set_progress: Callable[[Callable[[], float]], None],
    part: tuple[float, float] = (0.0, 1.0),
) -> Iterator[RawDocument]:
    """Rows of a parquet file.

    Args:
        skip: Rows to skip; row groups among them are not read.
        set_progress: Takes a function that gives the fraction of the file that was read. The file
            position would not show it: readers jump in it.
        part: Fractions of the rows between which the row groups that are read begin.
    """
    table = import_library("pyarrow.parquet", name).ParquetFile(file)
    schema = table.schema_arrow
    columns = selection.columns(name, schema.names, columns_of_schema(schema))
    rows = table.metadata.num_rows
    sizes = [table.metadata.row_group(at).num_rows for at in range(table.num_row_groups)]
    starts = [*itertools.accumulate(sizes, initial=0)]
    groups = [at for at in range(len(sizes)) if part[0] <= starts[at] / max(rows, 1) < part[1]]
    while groups and starts[groups[0] + 1] <= skip:
        groups.pop(0)
    read = starts[groups[0]] if groups else rows
    set_progress(lambda: read / max(rows, 1))
    for batch in table.iter_batches(ROWS, groups, columns=columns) if groups else ():
        if read + batch.num_rows > skip:
            yield from _batch_rows(name, read + 1, batch)
        read += batch.num_rows


def arrow_rows(name: str, file: BinaryIO, selection: Selection, skip: int) -> Iterator[RawDocument]:
    """Rows of an arrow file or stream, after `skip` rows."""
    pyarrow = import_library("pyarrow", name)
    magic = file.read(6)
    file.seek(0)
    read = 0
    if magic == b"ARROW1":
        table = pyarrow.ipc.open_file(file)
        batches = (table.get_batch(at) for at in range(table.num_record_batches))
    else:
        table = pyarrow.ipc.open_stream(file)
        batches = table
    columns = selection.columns(name, table.schema.names, columns_of_schema(table.schema))
    for batch in batches:
        if read + batch.num_rows > skip:
            for column in columns:
                _check_offsets(batch.column(column))
            for at in range(0, batch.num_rows, ROWS):
                if read + at + ROWS > skip:
                    part = batch.slice(at, ROWS).select(columns)
                    yield from _batch_rows(name, read + at + 1, part)
        read += batch.num_rows


def _check_offsets(column: Any) -> None:
    """Raises ValueError for damaged offsets, which would read arbitrary memory.

    Invalid UTF-8 in a text column is accepted here and reported row by row. In nested columns it
    would hide damage.
    """
    try:
        column.validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error) or str(column.type) not in STRING_TYPES:
            raise


def _batch_rows(name: str, first: int, batch: Any) -> Iterator[RawDocument]:
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows > 1:
            for at in range(batch.num_rows):
                yield from _batch_rows(name, first + at, batch.slice(at, 1))
            return
        values = [UnreadableDocument(INVALID_TEXT, f"is not UTF-8: {error}", "")]
    for index, value in enumerate(values, first):
        yield RawDocument(name, index, value)


def dataset_rows(name: str, selection: Selection, skip: int) -> Iterator[RawDocument]:
    """Rows of a Hugging Face data set, after `skip` rows."""
    data = _load_dataset(name, selection.inputs)
    if data.column_names is not None:
        types = columns_of_schema(data.features.arrow_schema) if data.features else Columns((), ())
        data = data.select_columns(selection.columns(name, data.column_names, types))
    # `skip` refuses to skip all rows, so the last one is skipped here.
    rows = itertools.islice(data.skip(skip - 1), 1, None) if skip else iter(data)
    for index in itertools.count(skip + 1):
        try:
            row = next(rows, None)
        except Exception as error:
            reason = f"row {index}: {describe_error(error)}"
            raise user_error("dataset-not-readable", name=name, reason=reason) from error
        if row is None:
            return
        yield RawDocument(name, index, row)


def _load_dataset(name: str, inputs: InputSpec) -> Any:
    datasets = import_library("datasets", f"{option('hf_dataset')} {name}")
    split = inputs.hf_split
    saved = ("state.json", "dataset_dict.json")
    try:
        if not any(os.path.isfile(os.path.join(name, file)) for file in saved):
            return datasets.load_dataset(name, inputs.hf_config, split=split, streaming=True)
        data = datasets.load_from_disk(name)
    except Exception as error:  # of any type, from the Hub to the libraries of the files
        reason = describe_error(error)
        raise user_error("dataset-not-readable", name=name, reason=reason) from error
    if isinstance(data, datasets.DatasetDict):
        if split in data:
            return data[split]
        raise user_error("no-such-split", split=split, reason=f"the data set has {', '.join(data)}")
    if split not in (InputSpec.hf_split, str(data.split)):
        raise user_error("no-such-split", split=split, reason="the saved data set has no splits")
    return data


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def content_size(value: bytes | dict[str, Any] | UnreadableDocument) -> int:
    """Approximate size of a raw document in memory."""
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, UnreadableDocument):
        return len(value.content)
    return sum(len(text) for text in value.values() if isinstance(text, str | bytes))


def decode(content: bytes) -> str:
    """Text of UTF-8 bytes. Invalid bytes become lone surrogates, which parsing rejects."""
    return content.decode("utf-8", "surrogateescape")
