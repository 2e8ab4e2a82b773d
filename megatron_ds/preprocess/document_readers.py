"""Documents of any kind of input, one after the other: JSON lines, tables, plain text, data sets.

Owns which files are meant and how each kind is read; memory is flat whatever their size. What a
JSON line holds is left to the worker processes, which parse it. Knows no tokenizer. pyarrow, fsspec
and datasets are imported only where an input needs them.
"""

from __future__ import annotations

import bz2
import csv
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple, TextIO, cast

from megatron_ds.data.indexed_dataset import TOKENIZER_SUFFIX

STDIN = "-"
FORMATS = ("jsonl", "parquet", "arrow", "csv", "tsv", "text")
SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
COMPRESSIONS = (".gz", ".xz", ".zst", ".bz2")
TEXT_DOCUMENTS = ("file", "paragraph")
ROWS = 128
"""Rows of a table that are taken out of its columns together."""
PLAIN_TEXT = ("string", "large_string", "string_view")
"""Types of a table's columns."""
PREVIEW_BYTES = 1000
"""Bytes that are kept of a document that is too long."""
QUARANTINE = ".quarantine"
"""Ends the name of the file that lists what gave no document."""
RUN_RECORD_SUFFIX = ".run.json"
"""Ends the name of the file that says what a run read and how far it came."""
INSTALL_HINT = "pip install 'megatron_ds[preprocess]'"

BROKEN_ROW = "broken row"
INVALID_TEXT = "invalid UTF-8"
TOO_LONG = "too long"


class UnreadableDocument(NamedTuple):
    """A line or row that gives no document: why in few words and in a sentence, and its content."""

    reason: str
    words: str
    content: str


class RawDocument(NamedTuple):
    """One document. line: its first line or its row, from 1. value: a JSON line as it stands, or
    fields by name."""

    file: str
    line: int
    value: bytes | dict[str, Any] | UnreadableDocument


class FileStamp(NamedTuple):
    """A file as it is now. mark: changes with its content, as far as its system tells; else ""."""

    name: str
    size: int
    mark: str


class ReadPosition(NamedTuple):
    """How far reading has come: up to and with the item on `line` of the file number `file`, from
    0; line 0 if nothing of that file is read. offset: the byte after that item in files that can be
    read from the middle, else 0."""

    file: int = 0
    line: int = 0
    offset: int = 0

    @property
    def files(self) -> int:
        """How many files were read or begun."""
        return self.file + (self.line > 0)


START = ReadPosition()


class _Source(NamedTuple):
    stamp: FileStamp
    open: Callable[[], AbstractContextManager[BinaryIO]]


@dataclass(frozen=True)
class InputSpec:
    """What is to be read.

    paths: files, patterns, folders, addresses with a protocol, `-` for the standard input. format:
    one of FORMATS, or "auto" for what a file's name says. text_documents: whether a document of
    plain text is a whole file or a block between blank lines. max_document_bytes: longer documents
    are not read.
    """

    paths: tuple[str, ...] = ()
    format: str = "auto"
    text_documents: str = "file"
    hf_dataset: str | None = None
    hf_config: str | None = None
    hf_split: str = "train"
    max_document_bytes: int = 1 << 27

    @property
    def name(self) -> str:
        """The flag and its value, for messages."""
        if self.hf_dataset is not None:
            return f"--hf-dataset {self.hf_dataset}"
        return f"--input {' '.join(self.paths)}"

    def problems(self) -> Iterator[str]:
        """What is wrong before anything is read. Addresses are looked at when they are read."""
        if bool(self.paths) == (self.hf_dataset is not None):
            yield "--input or --hf-dataset is needed, one of them"
        if self.format not in ("auto", *FORMATS):
            yield f"--input-format {self.format}: must be auto or one of {', '.join(FORMATS)}"
        if self.text_documents not in TEXT_DOCUMENTS:
            yield f"--text-documents {self.text_documents}: must be one of {TEXT_DOCUMENTS}"
        if not 1 <= self.max_document_bytes < 1 << 31:
            yield f"--max-document-bytes {self.max_document_bytes}: must be 1 to {(1 << 31) - 1}"
        if self.hf_dataset is None and (self.hf_config is not None or self.hf_split != "train"):
            yield "--hf-config and --split are for --hf-dataset"
        seen: set[str] = set()
        for path in self.paths:
            if _is_address(path):
                continue
            try:
                files = _local_files(path, self.format)
            except ValueError as error:
                yield str(error)
                continue
            for file in files:
                if file != STDIN and not os.access(file, os.R_OK):
                    yield f"--input {file}: cannot be read"
                if file in seen:
                    yield f"--input {file}: would be read twice"
                seen.add(file)

    def local_files(self) -> Iterator[str]:
        """The files of this machine that are read, without what is read once; addresses, and paths
        that mean no file, are passed over."""
        for path in self.paths:
            if not (path == STDIN or _is_address(path) or _is_pipe(path)):
                with suppress(ValueError):
                    yield from _local_files(path, self.format)

    def unseekable_paths(self) -> list[str]:
        """Those of the paths that cannot be read a second time: standard input and named pipes."""
        return [path for path in self.paths if path == STDIN or _is_pipe(path)]

    def file_stamps(self) -> Iterator[FileStamp]:
        """All files in the order in which they are read, without opening them."""
        if self.hf_dataset is not None:
            yield _stamp_of_dataset(self.hf_dataset, self.hf_split)
            return
        for source in _sources(self):
            yield source.stamp

    def total_bytes(self) -> int | None:
        """Size of all files as they are stored; None where that is not known beforehand."""
        if self.hf_dataset is not None or any(p == STDIN or _is_address(p) for p in self.paths):
            return None
        files = [file for path in self.paths for file in _local_files(path, self.format)]
        return sum(os.path.getsize(file) for file in files)


class DocumentReader:
    """The documents of `inputs`, in the order of the paths; those of a folder or a pattern by name.

    keys: names of the fields that are wanted; of `a.b` that is a column `a.b`, or the field b of a
    column `a`. after: where to go on; what stands before is passed over, files unopened. whole: the
    other columns of tables are wanted, too, and plain text needs no key. Iterating raises
    ValueError for a table without the column and for files that are damaged, and OSError for files
    that cannot be read, each with the file's name.
    """

    def __init__(
        self,
        inputs: InputSpec,
        keys: Sequence[str],
        after: ReadPosition = START,
        whole: bool = False,
    ) -> None:
        self._inputs = inputs
        self._keys = tuple(keys)
        self._whole = whole
        self._after = after
        self._number = after.file
        self._new: list[FileStamp] = []
        self._done = 0
        self._tell: Callable[[], int] = int
        self._offset: Callable[[], int] = int

    @property
    def position(self) -> int:
        """Bytes read so far of the files as they are stored."""
        return self._done + self._tell()

    def place(self, line: int) -> ReadPosition:
        """Where reading stands after the item that it gave last, which was on this line."""
        return ReadPosition(self._number, line, self._offset())

    @property
    def end(self) -> ReadPosition:
        """Where reading stands when it has come to the end."""
        return ReadPosition(self._number)

    def take_new_stamps(self) -> list[FileStamp]:
        """The files that were begun since this was last asked for."""
        new, self._new = self._new, []
        return new

    def __iter__(self) -> Iterator[RawDocument]:
        if self._inputs.hf_dataset is not None:
            if not self._after.files:
                self._new += self._inputs.file_stamps()
            if self._after.file == 0:
                yield from self._dataset(self._inputs.hf_dataset, self._after.line)
            self._number = 1
            return
        for number, source in enumerate(_sources(self._inputs)):
            if number < self._after.file:
                self._done += source.stamp.size
                continue
            self._number = number
            if number >= self._after.files:
                self._new.append(source.stamp)
            after = self._after if number == self._after.file else START
            with _naming(source.stamp.name), source.open() as file:
                yield from self._file(source.stamp.name, file, after)
            self._number += 1

    def _file(self, name: str, raw: BinaryIO, after: ReadPosition) -> Iterator[RawDocument]:
        kind, compression = _kind(name, self._inputs.format)
        size = 0
        with ExitStack() as stack:
            stack.enter_context(_naming(name))
            if raw.seekable():
                begin = raw.tell()  # of the standard input something may have been read
                size = raw.seek(0, os.SEEK_END)
                raw.seek(begin)
                self._tell = raw.tell
            if kind in ("parquet", "arrow"):
                if compression or not raw.seekable():
                    raise ValueError(
                        f"{name}: {kind} files are read as they are, not compressed as a whole and "
                        "not from a pipe"
                    )
                if kind == "parquet":
                    items = self._parquet(name, raw, size, after.line)
                else:
                    items = self._arrow(name, raw, after.line)
            else:
                if kind == "jsonl" and not compression and raw.seekable():
                    raw.seek(max(after.offset, raw.tell()))
                    self._offset = raw.tell
                stream = _decompressed(stack, raw, compression)
                if kind == "jsonl":
                    items = self._json_lines(name, stream, after.line if after.offset else 0)
                elif kind == "text":
                    items = self._text(name, stream)
                else:
                    items = self._csv(name, stream, "," if kind == "csv" else "\t")
            if after.line:
                items = itertools.dropwhile(lambda item: item.line <= after.line, items)
            yield from items
        self._done += size
        self._tell = self._offset = int

    def _json_lines(self, name: str, file: BinaryIO, before: int) -> Iterator[RawDocument]:
        for number, (line, whole) in enumerate(self._lines(file), before + 1):
            if not whole:
                yield RawDocument(name, number, self._oversized("line", line))
            elif not line.isspace():
                yield RawDocument(name, number, line)

    def _lines(self, file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
        """Lines with their ends; of one that is too long the beginning, and False."""
        limit = self._inputs.max_document_bytes
        while line := file.readline(limit + 1):
            if len(line) <= limit or line.endswith(b"\n"):
                yield line, True
                continue
            head = line[:PREVIEW_BYTES]
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)
            yield head, False

    def _text(self, name: str, file: BinaryIO) -> Iterator[RawDocument]:
        key = self._only_key(name)
        limit = self._inputs.max_document_bytes
        lines = self._lines(file)
        first, whole = next(lines, (b"", True))
        if self._inputs.format == "auto" and _is_object(first):
            raise ValueError(
                f"{name}: is named like plain text and begins like JSON lines: say which it is, "
                "with --input-format text or --input-format jsonl"
            )
        first = first.removeprefix(b"\xef\xbb\xbf")
        if self._inputs.text_documents == "paragraph":
            yield from self._paragraphs(name, key, itertools.chain([(first, whole)], lines))
            return
        content = first + file.read(max(0, limit + 1 - len(first)))
        if whole and len(content) <= limit:
            yield RawDocument(name, 1, {key: _decoded(content)})
        else:
            yield RawDocument(name, 1, self._oversized("file", content[:PREVIEW_BYTES]))

    def _paragraphs(
        self, name: str, key: str, lines: Iterable[tuple[bytes, bool]]
    ) -> Iterator[RawDocument]:
        limit = self._inputs.max_document_bytes
        block: list[bytes] = []
        size, begin, fits = 0, 1, True

        def document() -> RawDocument:
            content = b"".join(block)
            if not fits:
                return RawDocument(name, begin, self._oversized("block", content[:PREVIEW_BYTES]))
            return RawDocument(name, begin, {key: _decoded(content).rstrip("\r\n")})

        for number, (line, whole) in enumerate(lines, 1):
            if whole and line.isspace():
                if block:
                    yield document()
                block, size, fits = [], 0, True
                continue
            if not block:
                begin = number
            size += len(line)
            fits = fits and whole and size <= limit
            if fits or not block:
                block.append(line)
        if block:
            yield document()

    def _csv(self, name: str, file: BinaryIO, delimiter: str) -> Iterator[RawDocument]:
        csv.field_size_limit(self._inputs.max_document_bytes)
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        try:
            lines = _CsvLines(text, self._inputs.max_document_bytes)
            rows = csv.reader(lines, delimiter=delimiter)
            try:
                header = next(rows, None)
            except csv.Error as error:
                raise ValueError(f"{name}: its first line names no columns: {error}") from error
            if header is None:
                return
            self._check_columns(name, header)
            while True:
                begin = lines.number + 1
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    yield RawDocument(
                        name, begin, UnreadableDocument(BROKEN_ROW, f"is no row: {error}", "")
                    )
                    continue
                if row is None:
                    return
                if row and len(row) != len(header):
                    words = f"has {len(row)} fields, and the first line names {len(header)} columns"
                    content = json.dumps(row)
                    yield RawDocument(name, begin, UnreadableDocument(BROKEN_ROW, words, content))
                elif row:
                    yield RawDocument(name, begin, dict(zip(header, row, strict=True)))
        finally:
            text.detach()  # who opened the file closes it

    def _parquet(self, name: str, file: BinaryIO, size: int, after: int) -> Iterator[RawDocument]:
        """after: rows that were taken before; groups of them are passed over."""
        _pyarrow(name)
        from pyarrow import parquet

        table = parquet.ParquetFile(file)
        columns = self._check_columns(name, table.schema_arrow.names)
        rows = table.metadata.num_rows
        read = 0
        self._tell = lambda: size * read // max(rows, 1)
        groups = list(range(table.num_row_groups))
        while groups and read + (more := table.metadata.row_group(groups[0]).num_rows) <= after:
            read += more
            groups.pop(0)
        for batch in table.iter_batches(ROWS, groups, columns=columns) if groups else ():
            if read + batch.num_rows > after:
                yield from _rows(name, read + 1, batch)
            read += batch.num_rows

    def _arrow(self, name: str, file: BinaryIO, after: int) -> Iterator[RawDocument]:
        """after: rows that were taken before."""
        pyarrow = _pyarrow(name)
        magic = file.read(6)
        file.seek(0)
        read = 0
        if magic == b"ARROW1":
            table = pyarrow.ipc.open_file(file)
            batches = (table.get_batch(at) for at in range(table.num_record_batches))
        else:
            table = batches = pyarrow.ipc.open_stream(file)
        columns = self._check_columns(name, table.schema.names)
        for whole in batches:
            if read + whole.num_rows <= after:
                read += whole.num_rows
                continue
            for column in columns:
                _check_offsets(whole.column(column))
            for at in range(0, whole.num_rows, ROWS):
                if read + at + ROWS > after:
                    yield from _rows(name, read + at + 1, whole.slice(at, ROWS).select(columns))
            read += whole.num_rows

    def _dataset(self, name: str, after: int) -> Iterator[RawDocument]:
        """after: rows that were taken before, and are passed over."""
        try:
            import datasets
        except ImportError:
            raise ValueError(f"--hf-dataset {name}: needs datasets: {INSTALL_HINT}") from None
        inputs = self._inputs
        try:
            if any(
                os.path.isfile(os.path.join(name, file))
                for file in ("state.json", "dataset_dict.json")
            ):
                data = datasets.load_from_disk(name)
                if isinstance(data, datasets.DatasetDict):
                    if inputs.hf_split not in data:
                        raise ValueError(f"--split {inputs.hf_split}: it has {', '.join(data)}")
                    data = data[inputs.hf_split]
                elif inputs.hf_split not in (InputSpec.hf_split, str(data.split)):
                    raise ValueError(f"--split {inputs.hf_split}: the folder has no splits")
            else:
                data = datasets.load_dataset(
                    name, inputs.hf_config, split=inputs.hf_split, streaming=True
                )
        except Exception as error:  # of any kind, from the Hub to the files' libraries
            raise ValueError(f"--hf-dataset {name}: {_words(error)}") from error
        if data.column_names is not None:
            data = data.select_columns(self._check_columns(name, data.column_names))
        # Not all of them are skipped: datasets refuses to do so.
        rows = itertools.islice(data.skip(after - 1), 1, None) if after else iter(data)
        for number in itertools.count(after + 1):
            try:
                row = next(rows, None)
            except Exception as error:
                raise ValueError(f"--hf-dataset {name}: row {number}: {_words(error)}") from error
            if row is None:
                return
            yield RawDocument(name, number, row)

    def _check_columns(self, name: str, names: Sequence[str]) -> list[str]:
        """The columns that hold the keys. Raises ValueError if some are not there."""
        found = {
            key: next((part for part in (key, key.split(".")[0]) if part in names), None)
            for key in self._keys
        }
        for key, column in found.items():
            if column is None:
                raise ValueError(
                    f"{name}: has no column {key!r} (it has {', '.join(map(repr, names))}): name "
                    "one with --json-keys"
                )
            if names.count(column) > 1:
                raise ValueError(f"{name}: has {names.count(column)} columns {column!r}")
        if self._whole:
            return list(names)
        return list(dict.fromkeys(column for column in found.values() if column is not None))

    def _only_key(self, name: str) -> str:
        if self._whole and not self._keys:
            return "text"
        if len(self._keys) != 1:
            raise ValueError(f"{name}: plain text is one field: give one key with --json-keys")
        return self._keys[0]

    def _oversized(self, what: str, head: bytes) -> UnreadableDocument:
        limit = self._inputs.max_document_bytes
        words = f"the {what} is longer than {limit} bytes (--max-document-bytes)"
        if what == "file":
            words += "; --text-documents paragraph makes a document of each of its blocks"
        return UnreadableDocument(TOO_LONG, words, _decoded(head))


def _sources(inputs: InputSpec) -> Iterator[_Source]:
    """The files, in the order of the paths; each path is looked at when its turn comes."""
    for path in inputs.paths:
        if path == STDIN:
            yield _Source(FileStamp("<stdin>", 0, ""), lambda: nullcontext(sys.stdin.buffer))
        elif _is_address(path):
            yield from _remote(path, inputs.format)
        else:
            for name in _local_files(path, inputs.format):
                status = os.stat(name)
                stamp = FileStamp(name, status.st_size, str(status.st_mtime_ns))
                yield _Source(stamp, functools.partial(_opened, name))


def _opened(name: str) -> BinaryIO:
    return open(name, "rb")


def _remote(address: str, format: str) -> Iterator[_Source]:
    try:
        import fsspec
    except ImportError:
        raise ValueError(f"--input {address}: needs fsspec: {INSTALL_HINT}") from None
    whole = 0
    try:
        system, path = fsspec.core.url_to_fs(address)
        web = address.startswith(("http://", "https://"))  # no folders, and ? is no pattern
        if not web and glob.has_magic(path):
            paths = sorted(system.glob(path))
        elif not web and system.isdir(path):
            paths, whole = system.find(path), len(path)
        else:
            paths = [path]
    except OSError:
        raise
    except Exception as error:  # of the system's own kind: no credentials, no access
        raise ValueError(f"--input {address}: {_words(error)}") from error
    if whole:
        paths = _of_folder(address, paths, format, whole)
    if not paths:
        raise ValueError(f"--input {address}: there is no such file")
    for path in paths:
        stamp = FileStamp(system.unstrip_protocol(path), *_remote_stamp(system, path))
        yield _Source(stamp, functools.partial(system.open, path, "rb"))


def _remote_stamp(system: Any, path: str) -> tuple[int, str]:
    """Size and mark of a file; nothing where its system tells nothing before it is opened."""
    try:
        told = system.info(path)
    except Exception:  # of the system's own kind; what is wrong is said when it is opened
        return 0, ""
    return int(told.get("size") or 0), hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _stamp_of_dataset(name: str, split: str) -> FileStamp:
    """Of a saved folder when it was saved; a name's data are taken for what they were."""
    marks = (os.path.join(name, part, "state.json") for part in ("", split))
    found = next(filter(os.path.isfile, marks), None)
    return FileStamp(name, 0, "" if found is None else str(os.stat(found).st_mtime_ns))


class _CsvLines:
    """The lines of a text. Instead of one that is too long it raises csv.Error, and goes on: a
    generator would not."""

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
        raise csv.Error(f"its line is longer than {self._limit} characters (--max-document-bytes)")


def _check_offsets(column: Any) -> None:
    """Raises ValueError for a damaged column, whose values would be read from anywhere in memory.
    That a text is no UTF-8 is found row by row; in columns made of others that hides the rest."""
    try:
        column.validate(full=True)
    except ValueError as error:
        if "UTF8" not in str(error) or str(column.type) not in PLAIN_TEXT:
            raise


def _rows(name: str, first: int, batch: Any) -> Iterator[RawDocument]:
    try:
        values = batch.to_pylist()
    except UnicodeDecodeError:
        for at in range(batch.num_rows):
            try:
                yield RawDocument(name, first + at, batch.slice(at, 1).to_pylist()[0])
            except UnicodeDecodeError as error:
                yield RawDocument(
                    name, first + at, UnreadableDocument(INVALID_TEXT, f"is no text: {error}", "")
                )
        return
    for number, value in enumerate(values, first):
        yield RawDocument(name, number, value)


def _local_files(path: str, format: str) -> list[str]:
    """The files that a path means. Raises ValueError if there are none."""
    if path == STDIN or os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        return _of_folder(path, _walk(path), format, len(path.rstrip("/")))
    # A named pipe, or what a shell makes of <(command).
    if os.path.exists(path):
        return [path]
    matching = sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    files = [file for file in matching if os.path.isfile(file)]
    if not files:
        raise ValueError(f"--input {path}: there is no such file")
    return files


def _walk(path: str) -> list[str]:
    """A folder's files. Folders in it that are not looked into are named in a warning."""
    found: list[str] = []
    unread: list[str] = []

    def refused(error: OSError) -> None:
        unread.append(str(error.filename))

    for folder, folders, names in os.walk(path, onerror=refused):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += (os.path.join(folder, name) for name in names)
        inner = (os.path.join(folder, name) for name in folders)
        unread += filter(os.path.islink, inner)  # they may lead in circles
    if unread:
        warnings.warn(
            f"--input {path}: folders that are links, or that cannot be read, are left out, such "
            f"as {min(unread)}: name them with --input",
            stacklevel=2,
        )
    return found


def _of_folder(folder: str, files: Iterable[str], format: str, below: int) -> list[str]:
    """Those that are read of a folder's files, by name; the rest is named in a warning.

    below: length of the folder's own name in theirs.

    Names that begin with a dot or an underscore are marks and caches, and what was written beside
    token files is none of their text.
    """
    shown = [
        file
        for file in sorted(files)
        if not any(part.startswith((".", "_")) for part in file[below:].split("/"))
        and not file.endswith((".bin", ".idx", TOKENIZER_SUFFIX, QUARANTINE, RUN_RECORD_SUFFIX))
    ]
    taken = [file for file in shown if format != "auto" or _suffix_of(file)[0] in SUFFIXES]
    other = sorted(set(shown) - set(taken))
    if not taken:
        raise ValueError(
            f"--input {folder}: the folder has no file of a kind that is known by its name "
            f"({' '.join(SUFFIXES)}); give the files, or --input-format"
        )
    if other:
        warnings.warn(
            f"--input {folder}: {len(other)} files of no known kind are not read, such as "
            f"{other[0]}",
            stacklevel=2,
        )
    return taken


def _suffix_of(name: str) -> tuple[str, str]:
    """A name's suffix and, after it, that of the compression: ".jsonl" and ".gz"."""
    stem, suffix = os.path.splitext(name.lower().partition("?")[0] if _is_address(name) else name)
    suffix = suffix.lower()
    if suffix in COMPRESSIONS:
        return os.path.splitext(stem)[1].lower(), suffix
    return suffix, ""


def _kind(name: str, format: str) -> tuple[str, str]:
    """Format and compression of a file; JSON lines where the name says nothing."""
    suffix, compression = _suffix_of(name)
    return (SUFFIXES.get(suffix, "jsonl") if format == "auto" else format), compression


def _is_pipe(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _is_address(path: str) -> bool:
    return "://" in path


def _decompressed(stack: ExitStack, raw: BinaryIO, compression: str) -> BinaryIO:
    if not compression:
        return raw
    if compression == ".gz":
        return cast(BinaryIO, stack.enter_context(gzip.GzipFile(fileobj=raw)))
    if compression == ".bz2":
        return cast(BinaryIO, stack.enter_context(bz2.BZ2File(raw)))
    if compression == ".xz":
        return cast(BinaryIO, stack.enter_context(lzma.LZMAFile(raw)))
    pyarrow = _pyarrow("a .zst file")
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")
    return cast(BinaryIO, io.BufferedReader(stream, 1 << 20))


def _pyarrow(name: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise ValueError(f"{name}: needs pyarrow: {INSTALL_HINT}") from None
    return pyarrow


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Gives a damaged file's name to what its library says of it."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise ValueError(f"{name}: is damaged or cut off: {error}") from error
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"{name}: cannot be read: {error}") from error
    except ValueError as error:
        if str(error).startswith(name):
            raise
        raise ValueError(f"{name}: cannot be read: {error}") from error
    except Exception as error:  # libraries meet damage, and systems refusal, in ways of their own
        raise ValueError(f"{name}: cannot be read: {_words(error)}") from error


def _words(error: Exception) -> str:
    if isinstance(error, (ValueError, OSError, ImportError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _decoded(content: bytes) -> str:
    """Text; bytes that are none become halves of surrogate pairs, which nobody takes for text."""
    return content.decode("utf-8", "surrogateescape")
