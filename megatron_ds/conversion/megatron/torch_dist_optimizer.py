"""States of Megatron Core's distributed optimizer in a `torch_dist` checkpoint: flat buckets.

    optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_(...).bucket_idx_K.{param,exp_avg,...}
    optimizer.distributed.dp_group_idx_G.optimizer/shard_0_1    parameter groups, with the steps

G counts the tensor-parallel ranks of the first pipeline stage, then of the next one; B counts the
model chunks of a stage, and K the buckets of a chunk. What a rank has of a weight are the chunks in
which the weight was saved. Where a bucket has it is found by its values, as for `distrib_optim.pt`;
see `megatron_buffers`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_ds.conversion.megatron.distributed_optimizer import (
    MISPLACED,
    PARAM,
    UNKNOWN_FORM,
    Bucket,
    locate_by_value,
)
from megatron_ds.conversion.megatron.names import LAYER, canonical_name
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.engine.states.state_reader import MASTER, TensorReader, join

GROUPS_ENTRY = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\.(\w+)"
)
ORDER = (
    "embedding.word",
    "embedding.position",
    "attention_norm",
    "attention.proj",
    "attention.qkv",
    "mlp_norm",
    "mlp.fc_in",
    "mlp.fc_out",
    "final_norm",
    "head",
)
"""Order in which modules of Megatron Core register their parameters, as canonical names without the
layer."""

ReadPart = Callable[[str, Sequence[int], Sequence[int]], Tensor]
"""Reads a part of an entry: its key, first elements and sizes."""


@dataclass(frozen=True)
class WeightEntry:
    """A weight of the checkpoint.

    Attributes:
        key: Key of the entry, which may have the weights of all layers.
        layer: Its layer in such an entry.
        entry: Shape and chunks.
    """

    key: str
    layer: int | None
    entry: TensorStorageMetadata

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry.size[0 if self.layer is None else 1 :])

    def parts_of(self, rank: int, tp: int) -> _Parts:
        """Returns the parts on one of the tensor-parallel ranks."""
        skipped = 0 if self.layer is None else 1
        chunks = [
            chunk
            for chunk in self.entry.chunks
            if self.layer is None or chunk.offsets[0] == self.layer
        ]
        for axis in range(len(self.shape)):
            spans = {(c.offsets[skipped + axis], c.sizes[skipped + axis]) for c in chunks}
            if len(spans) in (tp, 2 * tp) and len(spans) > 1:
                return _Parts(axis, sorted(spans)[rank::tp])
        return _Parts(0, [(0, self.shape[0])])

    def read(self, read_part: ReadPart, parts: _Parts | None = None) -> Tensor:
        """Reads the weight, or what a rank has of it, as one tensor."""
        parts = parts or _Parts(0, [(0, self.shape[0])])
        read = []
        for start, size in parts.spans:
            offsets = [0] * len(self.shape)
            sizes = list(self.shape)
            offsets[parts.axis] = start
            sizes[parts.axis] = size
            layer = [] if self.layer is None else [self.layer]
            part = read_part(self.key, [*layer, *offsets], [*(1 for _ in layer), *sizes])
            read.append(part.view(sizes))
        return join(read, parts.axis)


@dataclass(frozen=True)
class _Parts:
    """Parts of a weight on a tensor-parallel rank.

    Attributes:
        axis: The sharded one.
        spans: First element and number of elements of each part: all of a weight that is not
            sharded, one part, or one of the gate and one of the up-projection.
    """

    axis: int
    spans: list[tuple[int, int]]


def has_buckets(metadata: Metadata) -> bool:
    return any(BUCKET.fullmatch(key) for key in metadata.state_dict_metadata)


def read_buckets(
    metadata: Metadata,
    weights: Mapping[str, WeightEntry],
    sizes: Sequence[int],
    read_part: ReadPart,
) -> tuple[dict[str, dict[str, TensorReader]], str]:
    """The states by kind and Megatron's name of the weight, or why they cannot be read.

    Args:
        metadata: Metadata of the checkpoint.
        weights: Its weights by Megatron's names, with layers counted over the complete model.
        sizes: Tensor-parallel size, pipeline stages and layers of the run that saved it.
        read_part: Reads from the checkpoint.
    """
    tp, pp, layers = sizes
    buckets = _buckets(metadata, read_part)
    groups = {group for group, _ in buckets}
    num_chunks = len(buckets) // max(len(groups), 1)
    stages = pp * num_chunks
    found_layers = {int(layer[1]) for name in weights if (layer := LAYER.match(name))}
    is_known = groups == {*range(tp * pp)} and layers % stages == 0
    is_known &= found_layers == {*range(layers)}
    if not is_known or not all(weight.shape for weight in weights.values()):
        return {}, UNKNOWN_FORM
    ranks: dict[str, list[tuple[Bucket, int, _Parts]]] = defaultdict(list)
    for (group, chunk), chunk_buckets in sorted(buckets.items()):
        stage, rank = divmod(group, tp)
        names = _stage_names(weights, chunk * pp + stage, stages, layers)
        parts = {name: weights[name].parts_of(rank, tp) for name in names}
        readers = {name: partial(weights[name].read, read_part, parts[name]) for name in names}
        # The last stage has a tied embedding, too, in a bucket of its own, which is not needed.
        places = locate_by_value(readers, chunk_buckets)
        if lost := [name for name in names if name not in places]:
            return {}, f"{MISPLACED} ({lost[0]})"
        for name, (index, start) in places.items():
            ranks[name].append((chunk_buckets[index], start, parts[name]))
    by_kind: dict[str, dict[str, TensorReader]] = {}
    for key in (*MOMENTS, MASTER):
        by_kind[key] = {
            name: TensorReader.full(
                weights[name].shape,
                torch.float32,
                partial(_join, weights[name], ranks[name], PARAM if key == MASTER else key),
            )
            for name in weights
        }
    return by_kind, ""


@dataclass(frozen=True)
class _Entry:
    """A flat tensor in the checkpoint."""

    key: str
    size: int
    read_part: ReadPart

    def numel(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(self.size)
        return self.read_part(self.key, (start,), (stop - start,))


def _buckets(metadata: Metadata, read_part: ReadPart) -> dict[tuple[int, int], list[Bucket]]:
    """The buckets of each group's model chunks that have all states of Adam."""
    entries: dict[tuple[int, int], dict[int, dict[str, _Entry]]] = defaultdict(dict)
    for key, entry in metadata.state_dict_metadata.items():
        match = BUCKET.fullmatch(key)
        if match is not None and isinstance(entry, TensorStorageMetadata):
            group, chunk, index = map(int, match.groups()[:3])
            bucket = entries[group, chunk].setdefault(index, {})
            bucket[match[4]] = _Entry(key, entry.size.numel(), read_part)
    return {
        chunk_key: [bucket for _, bucket in sorted(by_index.items())]
        for chunk_key, by_index in entries.items()
        if all({PARAM, *MOMENTS} <= bucket.keys() for bucket in by_index.values())
    }


def _stage_names(
    weights: Mapping[str, WeightEntry], stage: int, stages: int, layers: int
) -> list[str]:
    """The weights of a stage in the order in which its modules register them."""
    names = []
    for name in weights:
        inner = LAYER.sub("", canonical_name(name) or name)
        order = next((n for n, part in enumerate(ORDER) if inner.startswith(part)), len(ORDER))
        if layer := LAYER.match(name):
            index = int(layer[1])
            section = 1
            owner = index * stages // layers
        else:
            index = 0
            section = 0 if inner.startswith("embedding.") else 2
            owner = 0 if section == 0 else stages - 1
        if owner == stage:
            names.append(((section, index, order, name.endswith("bias")), name))
    return [name for _, name in sorted(names)]


def _join(weight: WeightEntry, ranks: Sequence[tuple[Bucket, int, _Parts]], key: str) -> Tensor:
    """Reads a state of a weight from the buckets of the ranks, each with its first element."""
    result = torch.empty(weight.shape)
    left = result.numel()
    for bucket, start, parts in ranks:
        for first, size in parts.spans:
            target = result.narrow(parts.axis, first, size)
            target.copy_(bucket[key][start : start + target.numel()].view(target.shape))
            start += target.numel()
            left -= target.numel()
        if left == 0:  # the other ranks have the same if it is not sharded
            break
    assert left == 0, left
    return result
