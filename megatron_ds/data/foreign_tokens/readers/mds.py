"""MosaicML's streaming datasets (MDS): index.json and shards of samples with columns.

A shard: uint32 count, count + 1 uint32 offsets of the samples from the file's start, JSON that
describes the columns, the samples. A sample: a uint32 size for each column without a fixed size,
then the columns. `mds_columns.py` has the encodings of a column of ids.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error
from megatron_ds.data.foreign_tokens.foreign_file import (
    BLOCK_BYTES,
    Block,
    ForeignTokens,
    ReadOptions,
)
from megatron_ds.data.foreign_tokens.readers.folder_index import listed_path, read_index
from megatron_ds.data.foreign_tokens.readers.mds_columns import (
    IdColumn,
    chosen_column,
    stated_type,
    values_of,
)
from megatron_ds.data.foreign_tokens.readers.numbers import mixed_widths
from megatron_ds.data.foreign_tokens.readers.unpacking import unpack
from megatron_ds.fileio.memory_map import map_file

INDEX = "index.json"
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Shard:
    """A shard. Implements `ForeignFile`.

    Attributes:
        whole: Bytes after decompression.
        samples: Number of samples.
        compression: Codec, without its level; "" for none.
        hashes: Hexadecimal digests of the stored file by algorithm.
        whole_hashes: The same of the content of a compressed file.
        column: The column of ids.
    """

    path: str
    size: int
    whole: int
    samples: int
    compression: str
    hashes: Mapping[str, str]
    whole_hashes: Mapping[str, str]
    column: IdColumn

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return self.column.dtype

    def blocks(self, position: int) -> Iterator[Block]:
        stored = self._stored()
        self._check_hashes(stored, self.hashes)
        content = unpack(stored, self.compression, self.whole, self.path)
        self._check_hashes(content, self.whole_hashes)
        offsets = self._offsets(content)
        share = self.size / max(self.whole, 1)
        while position < self.samples:
            reach = int(offsets[position]) + BLOCK_BYTES
            end = int(np.searchsorted(offsets, reach, side="right")) - 1
            end = min(max(end, position + 1), self.samples)
            bounds = offsets[position : end + 1]
            damaged = functools.partial(self._damaged, position)
            values = values_of(content, bounds, self.column, damaged)
            yield Block(*values, end, int((int(bounds[-1]) - int(bounds[0])) * share))
            position = end

    def type_of_first_sample(self) -> np.dtype[np.generic]:
        """The type that the first sample states."""
        content = unpack(self._stored(), self.compression, self.whole, self.path)
        bounds = self._offsets(content)[:2]
        return stated_type(content, bounds, self.column, functools.partial(self._damaged, 0))

    def _stored(self) -> Bytes:
        with open(self.path, "rb") as file:
            return map_file(file)

    def _offsets(self, content: Bytes) -> npt.NDArray[np.int64]:
        """[samples + 1], checked offsets of the samples."""
        head = 4 * (self.samples + 2)
        if content.size < head or int(content[:4].view("<u4")[0]) != self.samples:
            reason = f"it does not begin with the {self.samples} samples of {INDEX}"
            raise user_error("foreign-file-damaged", path=self.path, reason=reason)
        offsets = content[4:head].view("<u4").astype(np.int64)
        is_wrong = np.diff(offsets) < 0
        if is_wrong.any() or offsets[0] < head or offsets[-1] != content.size:
            at = int(is_wrong.argmax())
            reason = f"the offsets of its samples do not fit, such as that of sample {at}"
            raise user_error("foreign-file-damaged", path=self.path, reason=reason)
        return offsets

    def _check_hashes(self, content: Bytes, hashes: Mapping[str, str]) -> None:
        for name, expected in hashes.items():
            digest = _digest(name, content)
            if digest is not None and digest != expected:
                raise user_error(
                    "foreign-hash-differs",
                    path=self.path,
                    name=name,
                    digest=digest,
                    expected=expected,
                )

    def _damaged(self, first: int, sample: int, reason: str) -> Exception:
        shown = f"sample {first + sample}: {reason}"
        return user_error("foreign-file-damaged", path=self.path, reason=shown)

    def byte_of(self, token: int) -> int | None:
        return None


def _digest(name: str, content: Bytes) -> str | None:
    """A digest in hexadecimal; None if the algorithm is unknown."""
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name, content.data).hexdigest()
    if name in xxhash.algorithms_available:
        return str(getattr(xxhash, name)(content.data).hexdigest())
    return None


def open_folder(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens a folder with index.json; see `Reader`."""
    (folder,) = paths
    index = os.path.join(folder, INDEX)
    entries = read_index(index).get("shards")
    if not isinstance(entries, list) or not entries:
        raise user_error("foreign-index-damaged", path=index, reason="it lists no shards")
    problems = list[Problem]()
    shards = list[Shard]()
    for at, entry in enumerate(entries):
        with collect(problems):
            try:
                shards.append(_shard(folder, index, entry, options))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                if hasattr(error, "problems"):
                    raise
                reason = f"shard {at}: {type(error).__name__}: {error}"
                raise user_error("foreign-index-damaged", path=index, reason=reason) from error
    raise_if_any(dict.fromkeys(problems) or mixed_widths(shards))
    column = shards[0].column
    note = f"column {column.name!r} ({column.encoding}) as {column.dtype}"
    return ForeignTokens(
        shards, "samples of the shards", notes=(note,), joins_files=True, drops_tail=True
    )


def _shard(folder: str, index: str, entry: Any, options: ReadOptions) -> Shard:
    """The shard of an entry of the index.

    Raises:
        UserError: If its file is missing, or has another size or other columns than stated.
    """
    if entry["format"] != "mds":
        reason = f"a shard has the format {entry['format']}"
        raise user_error("foreign-index-damaged", path=index, reason=reason)
    raw = entry["raw_data"]
    packed = entry["zip_data"]
    stored = raw
    codec = ""
    if packed is not None and not os.path.lexists(os.path.join(folder, str(raw["basename"]))):
        stored = packed
        codec = str(entry["compression"]).partition(":")[0]
    path = listed_path(folder, stored["basename"], index)
    size = os.path.getsize(path)
    if size != stored["bytes"]:
        raise user_error(
            "foreign-size-differs", path=path, size=size, expected=stored["bytes"], source=index
        )
    whole = int(raw["bytes"])
    samples = int(entry["samples"])
    names = entry["column_names"]
    columns = list(zip(names, entry["column_encodings"], entry["column_sizes"], strict=True))

    def peek(column: IdColumn) -> np.dtype[np.generic]:
        first = Shard(path, size, whole, samples, codec, {}, {}, column)
        return first.type_of_first_sample()

    column = chosen_column(columns, options, peek, index)
    hashes = dict(stored.get("hashes") or {})
    whole_hashes = dict(raw.get("hashes") or {}) if codec else {}
    return Shard(path, size, whole, samples, codec, hashes, whole_hashes, column)
