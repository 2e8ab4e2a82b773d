"""Tensors and objects of a checkpoint of torch.distributed.

    FOLDER/.metadata                names, shapes and places of all entries
    FOLDER/__RANK_WRITER.distcp     their chunks, each a file of torch.save at an offset

Owns how a chunk is mapped into memory: only the rows that are used are read from the disk. Nothing
is unpickled but by `safe_unpickle` and by torch's own reader of tensors.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.conversion.safe_unpickle import read_dcp_metadata, read_foreign
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.engine.states.state_reader import Columns, TensorReader, join

INDEX = ".metadata"


class Window(io.RawIOBase):
    """A part of a file as a file of its own.

    Args:
        path: The file.
        offset: First byte of the part.
        length: Bytes of it.
    """

    def __init__(self, path: Path, offset: int, length: int) -> None:
        self._file = path.open("rb", buffering=0)
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count = self._file.readinto(view) if len(view) else 0
        self._position += count or 0
        return count or 0

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True)
class DcpFolder:
    """A checkpoint of torch.distributed.

    Args:
        path: Its folder.
        metadata: The contents of its `.metadata`.
    """

    path: Path
    metadata: Metadata

    @classmethod
    def open(cls, path: Path) -> DcpFolder:
        """Opens a folder.

        Raises:
            UserError: If `.metadata` is missing or damaged, or a file that it names is missing,
                too short or a link out of the folder.
        """
        folder = cls(path, read_dcp_metadata(path / INDEX))
        for name, size in folder._sizes.items():
            file = path / name
            if not file.is_file():
                raise user_error("checkpoint-file-missing", name=file)
            if not file.resolve().is_relative_to(path.resolve()):
                raise user_error("foreign-link-outside", path=file)
            if (present := file.stat().st_size) < size:
                error = f"it has {present} bytes of {size}: it is truncated"
                raise user_error("tensor-file-unreadable", path=file, error=error)
        return folder

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """The least bytes of each file."""
        sizes: dict[str, int] = {}
        for stored in self.metadata.storage_data.values():
            end = stored.offset + stored.length
            sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), end)
        return sizes

    @cached_property
    def _places(self) -> dict[tuple[str, int], _Place]:
        """Places of the values by file and offset of the chunk, of the chunks that were read."""
        return {}

    @cached_property
    def tensors(self) -> dict[str, TensorReader]:
        """All tensors by name, of which only the parts that are used are read."""
        return {
            key: self.tensor(key)
            for key, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def tensor(self, key: str) -> TensorReader:
        """The tensor of a name, of which only the parts that are used are read.

        Raises:
            UserError: If its chunks do not cover it.
        """
        entry = self._entry(key)
        # Chunks that overlap cover less than their elements, which reading finds.
        covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if covered < entry.size.numel():
            raise user_error("dcp-tensor-incomplete", folder=self.path, key=key)
        shape = tuple(entry.size)
        return TensorReader(shape, entry.properties.dtype, partial(self._rows, key))

    def read_part(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Reads a part of a tensor from the chunks that it overlaps; may be a view of a file.

        Raises:
            UserError: If a file is damaged, or the chunks do not cover the part.
        """
        entry = self._entry(key)
        wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        pieces = list(_overlaps(entry, wanted))
        if sum(piece.numel for piece in pieces) != wanted.sizes.numel():
            raise user_error("dcp-tensor-incomplete", folder=self.path, key=key)
        if len(pieces) == 1:
            return _aligned(self._chunk(key, pieces[0].chunk)[pieces[0].source])
        part = torch.empty(wanted.sizes, dtype=entry.properties.dtype)
        for piece in pieces:
            part[piece.target] = self._chunk(key, piece.chunk)[piece.source]
        return part

    def read_object(self, key: str) -> Any:
        """Reads an entry that is not a tensor; None if the checkpoint has no such entry.

        Raises:
            UserError: If it is damaged or names a class that is not listed.
        """
        stored = self.metadata.storage_data.get(MetadataIndex(key))
        if stored is None:
            return None
        path = self.path / stored.relative_path
        with Window(path, stored.offset, stored.length) as window:
            return read_foreign(window.read(stored.length) or b"", f"{path} ({key})")

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        return entry

    def _rows(self, key: str, rows: range, columns: Columns | None) -> Tensor:
        shape = [*self._entry(key).size]
        if not shape:
            return self.read_part(key, (), ())
        offsets = [rows.start, *[0] * (len(shape) - 1)]
        sizes = [len(rows), *shape[1:]]
        if columns is None:
            return self.read_part(key, offsets, sizes)
        dim, spans = columns
        parts = []
        for span in spans:
            offsets[dim] = span.start
            sizes[dim] = len(span)
            parts.append(self.read_part(key, offsets, sizes))
        return join(parts, dim)

    def _chunk(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        """A chunk, mapped into memory."""
        entry = self._entry(key)
        stored = self._stored(key, chunk)
        path = self.path / stored.relative_path
        start = (stored.relative_path, stored.offset)
        try:
            if start not in self._places:
                self._places[start] = _place_of(path, stored)
            value = _mapped(path, self._places[start])
        except UserError:
            raise
        except Exception as error:  # torch raises errors of its zip reader and its unpickler
            raise user_error("tensor-file-unreadable", path=path, error=error) from error
        wanted = (chunk.sizes, entry.properties.dtype)
        if (value.shape, value.dtype) != wanted:
            other = f"{key} has shape {list(value.shape)} and type {value.dtype}, not {wanted}"
            raise user_error("tensor-file-unreadable", path=path, error=other)
        return value

    def _stored(self, key: str, chunk: ChunkStorageMetadata) -> _StorageInfo:
        """The place of a chunk; an entry of one chunk may have no offsets."""
        storage = self.metadata.storage_data
        stored = storage.get(MetadataIndex(key, chunk.offsets)) or storage.get(MetadataIndex(key))
        if stored is None:
            raise user_error("dcp-tensor-incomplete", folder=self.path, key=key)
        if getattr(stored, "transform_descriptors", None):
            path = self.path / stored.relative_path
            error = f"its chunks are compressed ({stored.transform_descriptors})"
            raise user_error("tensor-file-unreadable", path=path, error=error)
        info: _StorageInfo = stored
        return info


@dataclass(frozen=True)
class _Place:
    """Where a file has the values of a chunk, and how they lie there."""

    start: int
    """Bytes from the beginning of the file."""
    size: int
    """Bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    """Elements before the first one."""


def _place_of(path: Path, stored: _StorageInfo) -> _Place:
    """Reads what a chunk says of its values by torch, which does not read the values."""
    with Window(path, stored.offset, stored.length) as window, FakeTensorMode():
        described = read_tensors(io.BufferedReader(window), classes=(), name=str(path))
    if not isinstance(described, Tensor):
        raise TypeError(f"it has a {type(described).__name__} instead of a tensor")
    storage = described.untyped_storage()
    start = storage._checkpoint_offset
    size = storage.nbytes()
    if start is None or start + size > stored.length:
        raise ValueError("its values are outside of the file")
    return _Place(
        start=stored.offset + start,
        size=size,
        dtype=described.dtype,
        shape=tuple(described.shape),
        strides=described.stride(),
        offset=int(described.storage_offset()),
    )


def _mapped(path: Path, location: _Place) -> Tensor:
    """The tensor at a place, whose values are read when they are used."""
    if not location.size:
        return torch.empty(location.shape, dtype=location.dtype)
    # A private map, because torch has no tensors that cannot be written.
    values = numpy.memmap(path, numpy.uint8, "c", location.start, (location.size,))
    flat = torch.from_numpy(values).view(location.dtype)
    return flat.as_strided(location.shape, location.strides, location.offset)


def _aligned(mapped: Tensor) -> Tensor:
    """A tensor whose address its type allows: torch places chunks at any byte of a file."""
    return mapped.clone() if mapped.data_ptr() % mapped.dtype.itemsize else mapped


@dataclass(frozen=True)
class _Overlap:
    """The common part of a chunk and of a part that is read."""

    chunk: ChunkStorageMetadata
    source: tuple[slice, ...]
    """Its indices in the chunk."""
    target: tuple[slice, ...]
    """Its indices in the part."""

    @property
    def numel(self) -> int:
        return torch.Size([index.stop - index.start for index in self.source]).numel()


def _overlaps(entry: TensorStorageMetadata, wanted: ChunkStorageMetadata) -> Iterator[_Overlap]:
    for chunk in entry.chunks:
        source = []
        target = []
        for at, size, start, length in zip(
            chunk.offsets, chunk.sizes, wanted.offsets, wanted.sizes, strict=True
        ):
            first = max(at, start)
            last = min(at + size, start + length)
            source.append(slice(first - at, last - at))
            target.append(slice(first - start, last - start))
        if all(index.start < index.stop for index in itertools.chain(source)):
            yield _Overlap(chunk, tuple(source), tuple(target))
