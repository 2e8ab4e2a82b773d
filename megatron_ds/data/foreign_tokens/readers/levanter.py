"""Levanter's caches: shard_ledger.json, and arrays of zarr for each field and shard.

`FIELD/offsets` has the number of rows, then the end of each row in ids; `FIELD/data` has the ids.
The shape of both arrays is larger than their content. A cache with the layout `sharded` has a
folder with these arrays for each of its shards, else the folder of the ledger has them. A row is a
document. tensorstore, which reads zarr, is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error
from megatron_ds.data.foreign_tokens.foreign_file import Block, ForeignTokens, ReadOptions
from megatron_ds.data.foreign_tokens.readers.folder_index import check_inside, read_index
from megatron_ds.data.foreign_tokens.readers.id_columns import choose_name
from megatron_ds.data.foreign_tokens.readers.numbers import mixed_widths
from megatron_ds.data.token_files.token_file import IntArray
from megatron_ds.fileio.safe_names import is_safe_name

LEDGER = "shard_ledger.json"
METADATA = "zarr.json"
SHARDED = "sharded"
BLOCK_TOKENS = 1 << 21
"""Ids that are read at once: several of the program's chunks of 2^18, which are compressed."""
LIBRARY_ERRORS = (ValueError, OSError, KeyError, RuntimeError)
"""What tensorstore raises for damaged arrays."""


@dataclass(frozen=True)
class CacheShard:
    """The ids of a field in a shard. Implements `ForeignFile`.

    Attributes:
        path: The description of the array of ids.
        array: Folder of the array of ids.
        ends: [rows], ends of the rows in ids.
    """

    path: str
    size: int
    dtype: np.dtype[np.generic]
    array: str
    ends: IntArray

    def blocks(self, position: int) -> Iterator[Block]:
        count = int(self.ends[-1]) if len(self.ends) else 0
        store = _open(self.array)
        while position < count:
            end = min(position + BLOCK_TOKENS, count)
            try:
                tokens = np.asarray(store[position:end].read().result())
            except LIBRARY_ERRORS as error:
                raise user_error("foreign-file-damaged", path=self.array, reason=error) from error
            low = np.searchsorted(self.ends, position, side="right") if position else 0
            high = np.searchsorted(self.ends, end, side="right")
            share = self.size * (end - position) // max(count, 1)
            yield Block(tokens, self.ends[low:high] - position, end, share)
            position = end

    def byte_of(self, token: int) -> int | None:
        return None


def open_folder(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens the folder of a cache; see `Reader`."""
    (folder,) = paths
    ledger_path = os.path.join(folder, LEDGER)
    ledger = read_index(ledger_path)
    import_library("tensorstore", f"{folder}, a Levanter cache")
    if not ledger.get("is_finished"):
        raise user_error("foreign-index-damaged", path=ledger_path, reason="it is not finished")
    shards = [("", int(ledger.get("total_num_rows", -1)))]
    if ledger.get("layout") == SHARDED:
        rows = ledger.get("shard_rows", {})
        shards = [(name, int(rows.get(name, -1))) for name in ledger.get("finished_shards", [])]
    problems = list[Problem]()
    files = list[CacheShard]()
    for name, count in shards:
        with collect(problems):
            files.append(_shard(folder, name, count, options))
    raise_if_any(dict.fromkeys(problems) or mixed_widths(files))
    if not files:
        raise user_error("foreign-index-damaged", path=ledger_path, reason="it lists no shards")
    name = os.path.basename(os.path.dirname(files[0].array))
    return ForeignTokens(
        files,
        "rows of the cache",
        notes=(f"field {name!r} as {files[0].dtype}",),
        joins_files=True,
        drops_tail=True,
    )


def _shard(folder: str, name: str, rows: int, options: ReadOptions) -> CacheShard:
    """A shard whose number of rows the ledger states.

    Raises:
        UserError: If arrays are missing, or have another number of rows.
    """
    ledger = os.path.join(folder, LEDGER)
    if name and not is_safe_name(name):
        raise user_error("foreign-name-leads-out", index=ledger, name=name)
    shard_folder = os.path.join(folder, name) if name else folder
    if not os.path.isdir(shard_folder):
        raise user_error("foreign-shard-missing", path=shard_folder, index=ledger)
    if name:
        check_inside(shard_folder, folder)
    fields = sorted(
        field
        for field in os.listdir(shard_folder)
        if os.path.isfile(os.path.join(shard_folder, field, "offsets", METADATA))
    )
    ids = [field for field in fields if "mask" not in field] or fields
    field = os.path.join(shard_folder, choose_name(ids, fields, options.column, shard_folder))
    _check_chunks(os.path.join(field, "offsets"), rows + 1, folder)
    offsets = _read_offsets(os.path.join(field, "offsets"), rows)
    data = os.path.join(field, "data")
    count = int(offsets[-1]) if rows else 0
    dtype = _check_chunks(data, count, folder)
    if dtype.kind not in "iu":
        raise user_error("foreign-column-not-ids", path=data, column=field, type=dtype)
    files = (os.path.join(path, one) for path, _, names in os.walk(data) for one in names)
    size = sum(map(os.path.getsize, files))
    return CacheShard(os.path.join(data, METADATA), size, dtype, data, offsets)


def _read_offsets(path: str, rows: int) -> IntArray:
    """[rows], ends of the rows in ids."""
    try:
        offsets = np.asarray(_open(path)[: rows + 1].read().result()).astype(np.int64)
    except LIBRARY_ERRORS as error:
        raise user_error("foreign-file-damaged", path=path, reason=error) from error
    if int(offsets[0]) != rows:
        reason = f"it has {offsets[0]} rows, and {LEDGER} states {rows}"
        raise user_error("foreign-file-damaged", path=path, reason=reason)
    wrong = np.flatnonzero(np.diff(offsets[1:], prepend=0) < 0)
    if len(wrong):
        at = int(wrong[0])
        reason = f"row {at} ends after {offsets[at + 1]} ids, before it begins"
        raise user_error("foreign-file-damaged", path=path, reason=reason)
    ends: IntArray = offsets[1:]
    return ends


def _check_chunks(path: str, count: int, folder: str) -> np.dtype[np.generic]:
    """The type of an array whose chunks all exist: zarr reads a missing one as zeros.

    Raises:
        UserError: If one is missing, or a link leads out of the folder.
    """
    metadata_path = os.path.join(path, METADATA)
    metadata: dict[str, Any] = read_index(metadata_path)
    check_inside(metadata_path, folder)
    try:
        shape = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        dtype: np.dtype[np.generic] = np.dtype(str(metadata["data_type"]))
        step = int(shape[0])
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise user_error("foreign-index-damaged", path=metadata_path, reason=reason) from error
    problems = list[Problem]()
    for chunk in range(-(-count // step)):
        name = os.path.join(path, "c", str(chunk))
        if not os.path.isfile(name):
            problems.append(Problem("foreign-shard-missing", path=name, index=metadata_path))
            continue
        with collect(problems):
            check_inside(name, folder)
    raise_if_any(problems)
    return dtype


def _open(path: str) -> Any:
    """The array in a folder."""
    tensorstore = import_library("tensorstore", path)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.abspath(path) + "/"}}
    try:
        return tensorstore.open(spec, open=True, read=True).result()
    except LIBRARY_ERRORS as error:
        raise user_error("foreign-file-damaged", path=path, reason=error) from error
