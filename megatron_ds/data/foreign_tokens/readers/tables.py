"""Parquet and Arrow files with a column of lists of ids, and folders of `datasets.save_to_disk`.

A row is a document. In a saved folder only the files that state.json lists count: others are of
earlier saves, or results of `map` and `filter`. pyarrow is imported where it is used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import user_error
from megatron_ds.data.foreign_tokens.foreign_file import Block, ForeignTokens, ReadOptions
from megatron_ds.data.foreign_tokens.readers.folder_index import listed_path, read_index
from megatron_ds.data.foreign_tokens.readers.id_columns import choose_name
from megatron_ds.data.foreign_tokens.readers.numbers import file_size, open_each
from megatron_ds.data.token_files.text_columns import columns_of_schema

STATE = "state.json"
MASK = "attention_mask"
BATCH_ROWS = 4096
STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
"""End of an Arrow stream."""
LIST_TYPES = ("list<", "large_list<", "fixed_size_list<")


@dataclass(frozen=True)
class Table:
    """A file of rows. Implements `ForeignFile`.

    Attributes:
        kind_name: "parquet" or "arrow".
        columns: The column of ids and, if there is one, its attention mask.
    """

    path: str
    size: int
    dtype: np.dtype[np.generic]
    kind_name: str
    rows: int
    columns: tuple[str, ...]

    def blocks(self, position: int) -> Iterator[Block]:
        row = 0
        batches = _parquet_batches if self.kind_name == "parquet" else _arrow_batches
        library_errors = _library_errors(self.path)
        try:
            for first, batch in batches(self.path, self.columns, position):
                row = first
                skipped = max(0, position - first)
                if skipped < batch.num_rows:
                    yield self._block(batch.slice(skipped), first + skipped)
        except library_errors as error:
            if hasattr(error, "problems"):
                raise
            reason = f"after row {row}: {error}"
            raise user_error("foreign-file-damaged", path=self.path, reason=reason) from error

    def _block(self, batch: Any, first: int) -> Block:
        """The ids of a batch whose first row has this number."""
        import pyarrow.compute as pc

        ids = batch.column(self.columns[0])
        self._check_nulls(ids, first)
        values = ids.flatten()
        if values.null_count:
            lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False)
            at = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            row = first + int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            raise user_error("foreign-row-null", path=self.path, row=row, column=self.columns[0])
        lengths = pc.list_value_length(ids).to_numpy(zero_copy_only=False)
        for name in self.columns[1:]:
            self._check_mask(batch.column(name), first)
        share = self.size * batch.num_rows // max(self.rows, 1)
        end = first + batch.num_rows
        return Block(values.to_numpy(zero_copy_only=False), np.cumsum(lengths), end, share)

    def _check_nulls(self, ids: Any, first: int) -> None:
        if ids.null_count:
            row = first + int(ids.is_null().to_numpy(zero_copy_only=False).argmax())
            raise user_error("foreign-row-null", path=self.path, row=row, column=self.columns[0])

    def _check_mask(self, mask: Any, first: int) -> None:
        """Raises UserError: If a row is padded, whose ids are not all of its text."""
        import pyarrow.compute as pc

        values = mask.flatten().to_numpy(zero_copy_only=False)
        if values.size and not values.all():
            lengths = pc.list_value_length(mask).to_numpy(zero_copy_only=False)
            at = int(np.searchsorted(np.cumsum(lengths), int((values == 0).argmax()), side="right"))
            raise user_error("foreign-row-padded", path=self.path, row=first + at)

    def byte_of(self, token: int) -> int | None:
        return None


def open_parquet(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens parquet files; see `Reader`."""
    return _open_tables(paths, options, "parquet")


def open_arrow(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens Arrow files or streams; see `Reader`."""
    return _open_tables(paths, options, "arrow")


def open_saved_dataset(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens a folder of `datasets.save_to_disk`; see `Reader`."""
    (folder,) = paths
    state = os.path.join(folder, STATE)
    if not os.path.exists(state) and os.path.exists(os.path.join(folder, "dataset_dict.json")):
        splits = sorted(
            name for name in os.listdir(folder) if os.path.exists(os.path.join(folder, name, STATE))
        )
        raise user_error("foreign-folder-of-splits", path=folder, splits=", ".join(splits))
    entries = read_index(state).get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise user_error("foreign-index-damaged", path=state, reason="it lists no files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    files = [listed_path(folder, name, state) for name in names]
    return _open_tables(files, options, "arrow")


def _open_tables(paths: Sequence[str], options: ReadOptions, name: str) -> ForeignTokens:
    import_library("pyarrow", paths[0])
    files = open_each(paths, functools.partial(_open_table, name=name, options=options))
    note = f"column {files[0].columns[0]!r} as {files[0].dtype}"
    return ForeignTokens(
        files, "rows of the tables", notes=(note,), joins_files=True, drops_tail=True
    )


def _open_table(path: str, *, name: str, options: ReadOptions) -> Table:
    """Reads the schema of a table.

    Raises:
        UserError: If it is damaged, or has no column of ids.
    """
    size = file_size(path)
    library_errors = _library_errors(path)
    try:
        if name == "parquet":
            from pyarrow import parquet

            file = parquet.ParquetFile(path, memory_map=True)
            schema = file.schema_arrow
            rows = file.metadata.num_rows
        else:
            _check_end(path)
            reader = _arrow_reader(path)
            schema = reader.schema
            rows = sum(batch.num_rows for batch in _batches_of(reader))
    except library_errors as error:
        if hasattr(error, "problems"):
            raise
        raise user_error("foreign-file-damaged", path=path, reason=error) from error
    column = choose_name(_id_columns(schema), schema.names, options.column, path)
    type = schema.field(column).type
    dtype = np.dtype(type.value_type.to_pandas_dtype())
    masks = (MASK,) if MASK in schema.names and column != MASK else ()
    return Table(path, size, dtype, name, rows, (column, *masks))


def _id_columns(schema: Any) -> list[str]:
    """Columns of lists of integers, without the masks that tokenizers add."""
    others = (MASK, "token_type_ids", "special_tokens_mask", "labels", "position_ids", "loss_mask")
    ids = [
        name
        for name in columns_of_schema(schema).ids
        if name in schema.names
        and str(schema.field(name).type).startswith(LIST_TYPES)
        and str(schema.field(name).type.value_type).startswith(("int", "uint"))
    ]
    return [name for name in ids if name not in others] or ids


def _parquet_batches(
    path: str, columns: tuple[str, ...], position: int
) -> Iterator[tuple[int, Any]]:
    """Number of the first row and rows of each batch, from the row group of a row on."""
    from pyarrow import parquet

    file = parquet.ParquetFile(path, memory_map=True)
    first = 0
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if first + rows > position:
            at = first
            for batch in file.iter_batches(
                BATCH_ROWS, row_groups=[group], columns=list(columns), use_threads=False
            ):
                yield at, batch
                at += batch.num_rows
        first += rows


def _arrow_batches(path: str, columns: tuple[str, ...], position: int) -> Iterator[tuple[int, Any]]:
    first = 0
    for batch in _batches_of(_arrow_reader(path)):
        if first + batch.num_rows > position:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield first + start, batch.select(list(columns)).slice(start, BATCH_ROWS)
        first += batch.num_rows


def _arrow_reader(path: str) -> Any:
    import pyarrow

    source = pyarrow.memory_map(path)
    with open(path, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
    return pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)


def _check_end(path: str) -> None:
    """Raises UserError: If a stream has no mark at its end: after the last rows that are left of
    a truncated one, readers see no damage."""
    with open(path, "rb") as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(-min(len(STREAM_END), os.path.getsize(path)), os.SEEK_END)
        if is_stream and file.read() != STREAM_END:
            reason = "it ends without the mark of the end of a stream: it is truncated"
            raise user_error("foreign-file-damaged", path=path, reason=reason)


def _batches_of(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _library_errors(path: str) -> tuple[type[Exception], ...]:
    """What pyarrow raises for a damaged file."""
    pyarrow = import_library("pyarrow", path)
    return (pyarrow.ArrowException, OSError, ValueError, EOFError)
