"""litdata's chunks for its TokensLoader: index.json and files of bare ids.

A chunk: uint32 number of items, items + 1 uint32 offsets from the file's start, the ids of all
items without gaps. index.json has the type as a number, `no_header_tensor:16`, and the ids of
each chunk as `dim`. An item is a document as its program saw it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error
from megatron_ds.data.foreign_tokens.foreign_file import (
    BLOCK_BYTES,
    Block,
    ForeignTokens,
    ReadOptions,
)
from megatron_ds.data.foreign_tokens.readers.folder_index import listed_path, read_index
from megatron_ds.data.foreign_tokens.readers.unpacking import unpack
from megatron_ds.fileio.memory_map import map_file

INDEX = "index.json"
TENSOR_TYPES = {11: "<u1", 12: "<i1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8"} | {
    18: "<i8",
    20: "<u2",
}
"""Integer types by their number for `no_header_tensor`."""
ARRAY_TYPES = dict(enumerate(("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8")))
"""The same for `no_header_numpy`."""
TYPES = {"no_header_tensor": TENSOR_TYPES, "no_header_numpy": ARRAY_TYPES}
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Chunk:
    """A chunk. Implements `ForeignFile`.

    Attributes:
        whole: Bytes after decompression.
        items: Number of items.
        count: Number of ids.
        compression: Codec, without its level; "" for none.
    """

    path: str
    size: int
    dtype: np.dtype[np.generic]
    whole: int
    items: int
    count: int | None
    compression: str

    @property
    def start(self) -> int:
        """Byte of the first id."""
        return 4 * (self.items + 2)

    def blocks(self, position: int) -> Iterator[Block]:
        with open(self.path, "rb") as file:
            content = unpack(map_file(file), self.compression, self.whole, self.path)
        ends = self._ends(content)
        tokens = (
            content[self.start :].copy().view(self.dtype)
            if self.start % self.dtype.itemsize
            else content[self.start :].view(self.dtype)
        )
        step = BLOCK_BYTES // self.dtype.itemsize
        share = self.size / max(self.whole, 1)
        while position < len(tokens):
            end = min(position + step, len(tokens))
            low, high = np.searchsorted(ends, (position, end), side="right")
            if position == 0:
                low = np.int64(0)
            num_bytes = int((end - position) * self.dtype.itemsize * share)
            yield Block(tokens[position:end], ends[low:high] - position, end, num_bytes)
            position = end

    def _ends(self, content: Bytes) -> npt.NDArray[np.int64]:
        """[items], checked ends of the items in ids."""
        if content.size < self.start or int(content[:4].view("<u4")[0]) != self.items:
            raise self._damaged(f"it does not begin with the {self.items} items of {INDEX}")
        offsets = content[4 : self.start].view("<u4").astype(np.int64)
        if offsets[0] != self.start or offsets[-1] != content.size:
            raise self._damaged("the offsets of its items do not fit")
        sizes = np.diff(offsets)
        is_wrong = (sizes < 0) | (sizes % self.dtype.itemsize != 0)
        if is_wrong.any():
            at = int(is_wrong.argmax())
            raise self._damaged(f"item {at} has {sizes[at]} bytes, which are no {self.dtype}")
        return (offsets[1:] - self.start) // self.dtype.itemsize

    def _damaged(self, reason: str) -> Exception:
        return user_error("foreign-file-damaged", path=self.path, reason=reason)

    def byte_of(self, token: int) -> int | None:
        return None if self.compression else self.start + token * self.dtype.itemsize


def open_folder(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens a folder with index.json; see `Reader`."""
    (folder,) = paths
    index = os.path.join(folder, INDEX)
    content = read_index(index)
    entries = content.get("chunks")
    config = content.get("config")
    if not isinstance(entries, list) or not entries or not isinstance(config, dict):
        raise user_error("foreign-index-damaged", path=index, reason="it lists no chunks")
    dtype = _type(index, config)
    codec = _codec(index, config)
    problems = list[Problem]()
    chunks = list[Chunk]()
    for at, entry in enumerate(entries):
        with collect(problems):
            try:
                chunks.append(_chunk(folder, index, entry, dtype, codec))
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                if hasattr(error, "problems"):
                    raise
                reason = f"chunk {at}: {type(error).__name__}: {error}"
                raise user_error("foreign-index-damaged", path=index, reason=reason) from error
    raise_if_any(problems)
    return ForeignTokens(
        chunks, "items of the chunks", (f"ids are {dtype}",), joins_files=True, drops_tail=True
    )


def _type(index: str, config: dict[str, Any]) -> np.dtype[np.generic]:
    formats = config.get("data_format")
    name = str(formats[0]) if isinstance(formats, list) and len(formats) == 1 else str(formats)
    serializer, _, code = name.partition(":")
    dtype = TYPES.get(serializer, {}).get(int(code) if code.isdecimal() else -1)
    if dtype is None:
        raise user_error("litdata-holds-other", path=index, format=name)
    return np.dtype(dtype)


def _codec(index: str, config: dict[str, Any]) -> str:
    """The compression of the chunks, without its level; "" for none."""
    for key, usual in (
        ("encryption", None),
        ("compression_level", "chunk"),
        ("ipc_compression", None),
    ):
        if config.get(key) not in (None, usual):
            raise user_error("litdata-holds-other", path=index, format=f"{key} {config[key]}")
    return str(config.get("compression") or "").partition(":")[0]


def _chunk(
    folder: str, index: str, entry: dict[str, Any], dtype: np.dtype[np.generic], codec: str
) -> Chunk:
    """The chunk of an entry of the index.

    Raises:
        UserError: If its file is missing, or has another size than stated.
    """
    path = listed_path(folder, entry["filename"], index)
    size = os.path.getsize(path)
    whole = int(entry["chunk_bytes"])
    items = int(entry["chunk_size"])
    count = entry.get("dim")
    if not codec and size != whole:
        raise user_error("foreign-size-differs", path=path, size=size, expected=whole, source=index)
    expected = 4 * (items + 2) + int(count or 0) * dtype.itemsize
    if count is not None and whole != expected:
        source = f"{index}, with {items} items of {count} ids as {dtype},"
        raise user_error(
            "foreign-size-differs", path=path, size=whole, expected=expected, source=source
        )
    return Chunk(path, size, dtype, whole, items, count, codec)
