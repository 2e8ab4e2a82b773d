"""Names of Megatron's weights, the orders of their rows, and joining of tensor-parallel shards.

Covers Megatron-LM before and since Megatron Core, both forks of Megatron-DeepSpeed, and the fused
names of Transformer Engine. Knows no files.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.data_files import read_table
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.model.declaration.architecture import unit_weights
from megatron_ds.parallel.weights import Weight

PREFIX = re.compile(r"^(language_model\.)?(embedding\.|encoder\.|transformer\.|decoder\.)?")
BUFFERS = re.compile(r"_extra_state(/|$)|(^|\.)rotary_(pos_)?emb\.")
COPY = "word_embeddings_for_head."
"""The last pipeline stage's copy of a tied embedding."""
LAYER = re.compile(r"layers\.(\d+)\.")
KIND = re.compile(r"(.+[._])(weight|bias|scale)")
DEPTH = re.compile(r"mtp\.layers\.(\d+)\.((?:transformer|mtp_model)_layer\.)?")
"""Start of the name of a weight of multi-token prediction, or of its transformer layer."""
EXPERT = re.compile(
    r"(.*mlp\.experts\.)(?:(?:local_)?experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d+)?"
)
"""A weight of one expert, or of all of a rank."""
NAMES: dict[str, Any] = read_table(__file__)
START = NAMES.pop("start")
MODULES = {name: module for module, names in NAMES.items() for name in names if name}


class QkvOrder(StrEnum):
    """Order of the rows of `query_key_value` within one tensor-parallel rank."""

    GROUPED = "for each key-value head its queries, key and value"
    BLOCKS = "all queries, then all keys, then all values"
    INTERLEAVED = "query, key and value of each element"


@dataclass(frozen=True)
class RowOrders:
    """Row orders of a checkpoint's fused weights."""

    heads: int
    """Query heads of the complete model."""
    groups: int
    """Key-value heads of the complete model."""
    head_dim: int
    qkv: QkvOrder
    gated: bool = False
    up_first: bool = False
    """A gated MLP's first half is the one that is not activated."""
    has_gate: bool = False
    """Whether queries are followed by the rows of their gates."""


def is_ignored(name: str) -> bool:
    """Whether an entry is a buffer, not a parameter."""
    return BUFFERS.search(name) is not None


def is_copy(name: str) -> bool:
    """Whether a parameter is a copy of another stage's."""
    return name.startswith(COPY)


def canonical_name(name: str, num_layers: int = 0) -> str | None:
    """Our name of a weight whose layer is counted over the complete model; None if it is unknown.

    Args:
        name: Megatron's name; for the weight of an expert, the name of all experts' weight.
        num_layers: Number of layers before the layers of multi-token prediction.
    """
    name = PREFIX.sub("", name)
    prefix = ""
    depth = DEPTH.match(name)
    if depth and depth[2]:
        name = f"layers.{num_layers + int(depth[1])}.{name[depth.end() :]}"
    elif depth:
        prefix = f"predictions.{depth[1]}."
        name = f"mtp.{name[depth.end() :]}"
    if layer := LAYER.match(name):
        prefix = layer[0]
    inner = re.sub(r"^attention\.", "self_attention.", name[layer.end() if layer else 0 :])
    if inner in MODULES:
        return f"{prefix}{MODULES[inner]}"
    match = KIND.fullmatch(inner)
    module = MODULES.get(match[1]) if match else None
    if match is None or module is None:
        return None
    return f"{prefix}{module}.{'weight' if match[2] == 'scale' else match[2]}"


def legacy_name(name: str) -> str:
    """Name of a weight before Megatron Core, without layer and prefix; empty if there was none."""
    module, suffix = _module(name)
    legacy: str = NAMES[module][0]
    return legacy and legacy + suffix


def core_names(names: Collection[str], num_layers: int) -> dict[str, str]:
    """Names of a model's weights in Megatron Core with the layers of Transformer Engine.

    A norm is part of the linear layer after it, where there is one.

    Args:
        names: Canonical names of all weights.
        num_layers: Number of layers before the layers of multi-token prediction.
    """
    layers = {name.rpartition(".")[0] for name in names}

    def core_name(name: str) -> str:
        module, suffix = _module(name)
        match = LAYER.match(name)
        prefix = match[0] if match else ""
        linear = ((choice, *choice.partition("layer_norm_")[:2]) for choice in NAMES[module][1:])
        inner = next(
            f"{choice}{suffix}"
            for choice, before, norm in linear
            if not norm or f"{prefix}{MODULES[before]}" in layers
        )
        start, index = name.split(".")[:2]
        if match and int(index) >= num_layers:
            return f"mtp.layers.{int(index) - num_layers}.mtp_model_layer.{inner}"
        return f"{START.get(start, '')}{prefix}{inner.replace('mtp.', f'mtp.layers.{index}.')}"

    return {name: core_name(name) for name in names}


def _module(name: str) -> tuple[str, str]:
    """The entry of `NAMES` of a weight of ours, and the end of its name."""
    inner = re.sub(r"^(layers|predictions)\.\d+\.", "", name)
    module, _, suffix = inner.rpartition(".")
    return (inner, "") if inner in NAMES else (module, suffix)


def stack_experts(ranks: Sequence[Mapping[str, TensorReader]]) -> dict[str, TensorReader]:
    """Weights of expert-parallel ranks under their names without the number of an expert.

    Those of experts get a first axis that counts them.
    """
    tensors: dict[str, TensorReader] = {}
    stacks: dict[str, dict[tuple[int, int], TensorReader]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, weights in enumerate(ranks):
        for name, tensor in weights.items():
            if (match := EXPERT.fullmatch(name)) is None:
                tensors.setdefault(name, tensor)
                continue
            index = match[2] or match[4]
            stack = f"{match[1]}{match[3]}"
            stacks[stack][rank, int(index or 0)] = tensor
            shapes[stack] = tensor.shape if index else tensor.shape[1:]
    for name, shape in shapes.items():
        parts = [part for _, part in sorted(stacks[name].items())]
        full = (sum(part.numel for part in parts) // math.prod(shape), *shape)
        tensors[name] = TensorReader.full(full, parts[0].dtype, partial(_stacked, parts, shape))
    return tensors


def _stacked(parts: Sequence[TensorReader], shape: tuple[int, ...]) -> Tensor:
    return torch.cat([part.read().view(-1, *shape) for part in parts])


def join(name: str, shards: Sequence[Tensor], orders: RowOrders) -> Tensor:
    """The full tensor, in our order, of all tensor-parallel ranks' shards.

    Args:
        name: Canonical name.
        shards: One tensor per rank, in their order.
        orders: Orders of the shards' rows.
    """
    if ".attention.qkv." in name:
        ranks = [_split_qkv(shard, orders, len(shards)) for shard in shards]
        return torch.cat([part for parts in zip(*ranks, strict=True) for part in parts])
    dim = _cut_dimension(name)
    if dim is not None and ".fc_in." in name and orders.gated:
        halves = [shard.chunk(2, dim) for shard in shards]
        order = (1, 0) if orders.up_first else (0, 1)
        return torch.cat([half[index] for index in order for half in halves], dim)
    return shards[0] if dim is None or len(shards) == 1 else torch.cat(list(shards), dim=dim)


def joined_shape(name: str, shard: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape of the tensor that `join` makes of `ranks` shards of shape `shard`."""
    dim = _cut_dimension(name)
    if dim is None:
        return shard
    return (*shard[:dim], shard[dim] * ranks, *shard[dim + 1 :])


def declared(name: str) -> Weight | None:
    """The declaration of a weight, apart from its sizes."""
    return unit_weights().get(LAYER.sub("layers.0.", name))


def _cut_dimension(name: str) -> int | None:
    """The dimension that tensor parallelism shards; None for a replicated tensor."""
    weight = declared(name)
    return None if weight is None or weight.shard is None else weight.shard.dim


def _split_qkv(shard: Tensor, orders: RowOrders, ranks: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of one rank, each [heads x head size, ...] by head."""
    heads = orders.heads // ranks
    groups = orders.groups // ranks
    other_sizes = shard.shape[1:]
    size = orders.head_dim
    match orders.qkv:
        case QkvOrder.BLOCKS:
            parts = shard.split([heads * size, groups * size, groups * size])
        case QkvOrder.INTERLEAVED:
            parts = shard.view(heads, size, 3, *other_sizes).unbind(2)
        case QkvOrder.GROUPED:
            per_group = heads // groups
            sizes = [per_group] * (1 + orders.has_gate) + [1, 1]
            grouped = shard.view(groups, sum(sizes), size, *other_sizes)
            parts = grouped.split(sizes, dim=1)
            parts = parts if len(parts) == 3 else (parts[0], *parts[2:], parts[1])
    return tuple(part.reshape(-1, *other_sizes) for part in parts)
