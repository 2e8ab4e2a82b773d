"""Writes a pair .bin and .idx as files of other trainers.

Files get their names when they are complete. Blocks of the pair are written one by one, so memory
is flat. Ids stay as they are; formats without documents lose their boundaries, unless each
document has the end token.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import Problem, ignore, raise_if_any, user_error
from megatron_ds.data.foreign_tokens.foreign_file import BLOCK_BYTES
from megatron_ds.data.foreign_tokens.readers.arrays import METADATA_SUFFIX
from megatron_ds.data.foreign_tokens.readers.flat import HEADER_BYTES, HEADERS
from megatron_ds.data.token_files.token_file import IntArray, TokenArray, TokenFile, Tokens
from megatron_ds.fileio.atomic import atomic_write

BLOCK_DOCUMENTS = 1 << 16
PROBED_DOCUMENTS = 32
"""Documents of a URL whose end token is compared."""
ROW_GROUP_TOKENS = 1 << 22
MAX_COUNT = 2**31 - 1
"""Most ids of a file of llm.c, whose header has 32 bits for their number."""
Report = Callable[[int], None]
"""Takes the tokens that were written."""


@dataclass(frozen=True)
class ExportFormat:
    """A format of files.

    Attributes:
        write: Writes the pair to the files of `suffixes`.
        suffixes: Ends of the names of the files, after the output's name without its suffix; the
            first file has the output's own name.
        types: Types of ids, the narrowest first.
        keeps_documents: Whether the files have the boundaries of documents.
        marks_begin: Whether its programs expect the end token in front of documents.
    """

    write: Callable[[Export, list[BinaryIO]], None]
    types: tuple[str, ...]
    suffixes: tuple[str, ...] = ("",)
    keeps_documents: bool = True
    marks_begin: bool = False


@dataclass(frozen=True)
class Export:
    """A pair, and how it is written.

    Attributes:
        pair: The pair.
        dtype: Type of the ids in the files.
        report: Takes the tokens that were written.
    """

    pair: TokenFile
    dtype: np.dtype[np.generic]
    report: Report = ignore

    @property
    def count(self) -> int:
        """Number of ids."""
        return int(self.pair.tokens.size)

    def blocks(self) -> Iterator[Tokens]:
        """All ids, in the type of the files."""
        step = BLOCK_BYTES // self.dtype.itemsize
        for first in range(0, self.count, step):
            yield self.ids(first, min(first + step, self.count))
            self.report(min(first + step, self.count))

    def ids(self, first: int, end: int) -> Tokens:
        """Some ids in the type of the files.

        Raises:
            UserError: If one does not fit it.
        """
        tokens: Tokens = self.pair.tokens[first:end]
        highest = int(np.iinfo(self.dtype).max)  # type: ignore[type-var]
        if not np.can_cast(tokens.dtype, self.dtype):
            is_outside = (tokens < 0) | (tokens > highest)  # type: ignore[operator]
            if is_outside.any():
                at = int(is_outside.argmax())
                raise user_error(
                    "export-id-too-high",
                    prefix=self.pair.prefix,
                    at=first + at,
                    token=int(tokens[at]),
                    highest=highest,
                    dtype=self.dtype,
                )
        return tokens.astype(self.dtype, copy=False)

    def document_ends(self) -> Iterator[IntArray]:
        """Ends of the documents in tokens, BLOCK_DOCUMENTS at a time."""
        index = self.pair.document_index
        item = self.pair.dtype.itemsize
        for first in range(1, len(index), BLOCK_DOCUMENTS):
            sequences = np.asarray(index[first : first + BLOCK_DOCUMENTS])
            ends = np.full(len(sequences), self.count, np.int64)
            inside = sequences < len(self.pair)
            ends[inside] = self.pair.pointers[sequences[inside]] // item
            yield ends


def export_tokens(export: Export, path: str, format: str, *, overwrite: bool = False) -> list[str]:
    """Writes the files of a pair.

    Args:
        export: The pair.
        path: The first file.
        format: One of `FORMATS`.
        overwrite: Whether existing files are replaced.

    Returns:
        The files.

    Raises:
        UserError: If a file exists, or the ids do not fit the format. Nothing is left then.
    """
    export_format = FORMATS[format]
    stem = os.path.splitext(path)[0]
    paths = [path, *(stem + suffix for suffix in export_format.suffixes[1:])]
    existing = [] if overwrite else list(filter(os.path.exists, paths))
    raise_if_any(Problem("export-exists", path=path) for path in existing)
    with ExitStack() as stack:
        files = [stack.enter_context(atomic_write(path)) for path in paths]
        export_format.write(export, files)
    return paths


def lost_boundaries(export: Export, format: str) -> Iterator[Problem]:
    """The warning that readers of the format cannot find the documents."""
    export_format = FORMATS[format]
    if export_format.keeps_documents or not export.count:
        return
    begin = 0
    marks = set[int]()
    for ends in export.document_ends():
        starts = np.concatenate([[begin], ends[:-1]])
        has_tokens = ends > starts
        begin = int(ends[-1])
        at = (starts if export_format.marks_begin else ends - 1)[has_tokens]
        marks.update(_some(export.pair.tokens, at))
        if len(marks) > 1:
            side = "begin" if export_format.marks_begin else "end"
            yield Problem("export-loses-documents", prefix=export.pair.prefix, side=side)
            return


def _some(tokens: TokenArray, places: IntArray) -> set[int]:
    """Two of the different ids at some places; of a URL only a few places are read."""
    if isinstance(tokens, np.ndarray):
        return set(np.unique(tokens[places])[:2].tolist())
    return {int(tokens[index]) for index in places[:PROBED_DOCUMENTS].tolist()}


def _write_bare(export: Export, files: list[BinaryIO]) -> None:
    for block in export.blocks():
        files[0].write(np.ascontiguousarray(block).data)


def _write_llm_c(export: Export, files: list[BinaryIO]) -> None:
    if export.count > MAX_COUNT:
        raise user_error("export-too-long", prefix=export.pair.prefix, count=export.count)
    magic, version = next(key for key, dtype in HEADERS.items() if dtype == export.dtype)
    head = struct.pack("<3i", magic, version, export.count)
    files[0].write(head.ljust(HEADER_BYTES, b"\0"))
    _write_bare(export, files)


def _write_olmo(export: Export, files: list[BinaryIO]) -> None:
    _write_bare(export, files[:1])
    begin = 0
    # Neither name nor time, so that the same documents give the same bytes.
    with gzip.GzipFile("", "wb", 6, files[1], mtime=0) as sink:
        for ends in export.document_ends():
            rows = list[str]()
            for end in ends.tolist():
                rows.append(f"{begin},{end}\n")
                begin = end
            sink.write("".join(rows).encode())


def _write_numpy(export: Export, files: list[BinaryIO]) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(export.dtype),
        "fortran_order": False,
        "shape": (export.count,),
    }
    np.lib.format.write_array_header_1_0(files[0], header)
    _write_bare(export, files)


def _write_parquet(export: Export, files: list[BinaryIO]) -> None:
    pyarrow = import_library("pyarrow", "--format parquet", "format")
    parquet = import_library("pyarrow.parquet", "--format parquet", "format")
    type = pyarrow.list_(pyarrow.from_numpy_dtype(export.dtype))
    schema = pyarrow.schema([("input_ids", type)])
    begin = 0
    with parquet.ParquetWriter(files[0], schema) as writer:
        for ends in export.document_ends():
            at = 0
            while at < len(ends):
                until = int(np.searchsorted(ends, begin + ROW_GROUP_TOKENS, side="right"))
                until = max(until, at + 1)
                offsets = np.concatenate([[0], ends[at:until] - begin])
                writer.write_table(_rows(pyarrow, export, begin, offsets, schema))
                begin = int(ends[until - 1])
                at = until
                export.report(begin)


def _rows(pyarrow: Any, export: Export, begin: int, offsets: IntArray, schema: Any) -> Any:
    """A table of documents.

    Args:
        begin: First token of the first document.
        offsets: [d + 1] tokens in front of each document, and of the end.
    """
    if int(offsets[-1]) > MAX_COUNT:
        raise user_error("export-too-long", prefix=export.pair.prefix, count=int(offsets[-1]))
    ids = pyarrow.array(np.ascontiguousarray(export.ids(begin, begin + int(offsets[-1]))))
    column = pyarrow.ListArray.from_arrays(pyarrow.array(offsets.astype(np.int32)), ids)
    return pyarrow.table([column.cast(schema.field(0).type)], schema=schema)


FORMATS: dict[str, ExportFormat] = {
    "nanogpt": ExportFormat(_write_bare, ("<u2",), keeps_documents=False),
    "llm.c": ExportFormat(_write_llm_c, ("<u2", "<u4"), keeps_documents=False, marks_begin=True),
    "olmo": ExportFormat(_write_olmo, ("<u2", "<u4"), ("", METADATA_SUFFIX)),
    "numpy": ExportFormat(_write_numpy, ("<u2", "<i4"), keeps_documents=False),
    "parquet": ExportFormat(_write_parquet, ("<i4",)),
}
"""The formats that are written, by the names that `--format` of both programs gives them."""


def id_type(format: str, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The type of the ids in files of a format: the narrowest that holds the type of a pair, else
    the widest."""
    types = [np.dtype(name) for name in FORMATS[format].types]
    wide = [one for one in types if one.itemsize >= dtype.itemsize]
    return wide[0] if wide else types[-1]
