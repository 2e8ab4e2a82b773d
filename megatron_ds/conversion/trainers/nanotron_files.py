"""Tensors in nanotron's files: a file for each tensor, or for each shard of it.

    FOLDER/model/MODULE/.../model_weight.safetensors
    FOLDER/model/MODULE/.../model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors

The names of folders are those of modules. The tensor of a file is `data`; the metadata of a shard
say which part of the complete tensor it is. Facts: nanotron's source, `serialize/weights.py`,
`serialize/metadata.py` and `parallel/parameters.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.model_settings import malformed_values
from megatron_ds.conversion.safetensors_files import open_safetensors
from megatron_ds.conversion.trainers.open_model import file_in
from megatron_ds.engine.states.state_reader import Columns, TensorReader, part_of

DATA = "data"
FILE = re.compile(r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-(\d+))?\.safetensors")
SLICES = "local_global_slices_pairs"
SHAPE = "unsharded_shape"

Slices = tuple[slice, ...]
Parts = Sequence[tuple[Slices, Slices]]
"""Rows and columns of parts of a shard, and where they are in the complete tensor."""


@dataclass(frozen=True)
class ShardedTensor:
    """A weight, and how shards of tensor-parallel ranks are joined; also of its states."""

    shards: Mapping[int, TensorReader]
    """The weight's, by rank; one that is not sharded is that of rank 0."""
    parts: Mapping[int, Parts]
    """The parts of each shard; empty if it is not sharded."""
    shape: tuple[int, ...]

    def joined(self, shards: Mapping[int, TensorReader]) -> TensorReader:
        """The complete tensor of shards like the weight's."""
        first = shards[min(shards)]
        if not self.parts:
            return first
        parts = [
            _Shard(shards[rank], local, whole)
            for rank in sorted(self.parts)
            for local, whole in self.parts[rank]
        ]
        load = partial(_read, parts, self.shape, first.dtype)
        return TensorReader(self.shape, first.dtype, load)

    @property
    def weight(self) -> TensorReader:
        """The complete weight."""
        return self.joined(self.shards)


def read_tensors(folder: Path) -> dict[str, ShardedTensor]:
    """The tensors of the folder of a step by their names.

    Raises:
        UserError: If files are missing, damaged or unknown.
    """
    root = folder / "model"
    shards: dict[str, dict[int, Path]] = defaultdict(dict)
    sizes: dict[str, int] = {}
    for path in sorted(root.rglob("*.safetensors")):
        match = FILE.fullmatch(path.name)
        if match is None:
            raise user_error("foreign-tensors-unknown", path=folder, names=path.name)
        name = ".".join((*path.relative_to(root).parent.parts, match[1]))
        shards[name][int(match[2] or 0)] = file_in(folder, str(path.relative_to(folder)))
        sizes[name] = max(sizes.get(name, 1), int(match[3] or 1))
    for name, files in shards.items():
        if missing := sorted({*range(sizes[name])} - files.keys()):
            names = ", ".join(f"{name} of tp-rank-{rank}" for rank in missing)
            raise user_error("foreign-tensors-missing", path=folder, names=names)
    return {name: _sharded(name, files) for name, files in shards.items()}


@dataclass(frozen=True)
class _Shard:
    """A part of a shard, and its rows and columns in the complete tensor."""

    tensor: TensorReader
    local: tuple[slice, ...]
    whole: tuple[slice, ...]


def _sharded(name: str, files: Mapping[int, Path]) -> ShardedTensor:
    """A tensor in some files, by rank."""
    shards: dict[int, TensorReader] = {}
    parts: dict[int, Parts] = {}
    shape: tuple[int, ...] = ()
    for rank, path in sorted(files.items()):
        tensor = open_safetensors(path).get(DATA)
        if tensor is None:
            raise user_error("foreign-file-unreadable", path=path, error=f"it has no {DATA}")
        shards[rank] = tensor
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise user_error("foreign-file-unreadable", path=path, error=error) from error
        if SLICES not in metadata:
            return ShardedTensor({0: tensor}, {}, tensor.shape)
        with malformed_values(path):
            shape = _shape(metadata[SHAPE])
            pairs = (pair.split("#") for pair in metadata[SLICES].split(";"))
            parts[rank] = [(_slices(local, shape), _slices(whole, shape)) for local, whole in pairs]
    covered = sum(_numel(whole) for pairs in parts.values() for _, whole in pairs)
    if covered != torch.Size(shape).numel():
        raise user_error("dcp-tensor-incomplete", folder=files[0].parent, key=name)
    return ShardedTensor(shards, parts, shape)


def _shape(text: str) -> tuple[int, ...]:
    """A shape such as `(64, 32)`, or `(np.int64(64), 32)` of version 0.4 with a newer numpy."""
    numbers = re.findall(r"(?:np\.int\d+\()?(\d+)\)?", text.strip("()"))
    return tuple(map(int, numbers))


def _slices(text: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Slices such as `0,16,None|None,None,None`; the end of an open one is the tensor's."""
    slices = []
    for entry, size in zip(text.split("|"), shape, strict=True):
        first, last, step = (None if word == "None" else int(word) for word in entry.split(","))
        if step not in (None, 1):
            raise ValueError(f"a step of {step}")
        slices.append(slice(first or 0, size if last is None else last))
    return tuple(slices)


def _numel(slices: Sequence[slice]) -> int:
    return torch.Size([index.stop - index.start for index in slices]).numel()


def _read(
    parts: Sequence[_Shard],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rows: range,
    columns: Columns | None,
) -> Tensor:
    """Rows of a complete tensor."""
    result = torch.empty((len(rows), *shape[1:]), dtype=dtype)
    for part in parts:
        first = max(rows.start, part.whole[0].start)
        last = min(rows.stop, part.whole[0].stop)
        if first < last:
            start = part.local[0].start + first - part.whole[0].start
            values = part.tensor.read(range(start, start + last - first))
            inner = tuple(index for index in part.local[1:])
            target = (slice(first - rows.start, last - rows.start), *part.whole[1:])
            result[target] = values[(slice(None), *inner)]
    return part_of(result, range(len(rows)), columns)
