"""Names of Megatron's weights, the orders of their rows, and joining of tensor-parallel shards.

Covers Megatron-LM before and since Megatron Core, both forks of Megatron-DeepSpeed, and the fused
names of Transformer Engine. Knows no files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from megatron_ds.config.data_files import read_table
from megatron_ds.model.spec.architecture import unit_weights
from megatron_ds.parallel.weights import Weight

PREFIX = re.compile(r"^(language_model\.)?(embedding\.|encoder\.|transformer\.|decoder\.)?")
BUFFERS = re.compile(r"_extra_state(/|$)|(^|\.)rotary_(pos_)?emb\.")
COPY = "word_embeddings_for_head."
"""The last pipeline stage's copy of a tied embedding."""
LAYER = re.compile(r"layers\.(\d+)\.")
KIND = re.compile(r"(.+[._])(weight|bias|scale)")
NAMES: dict[str, list[str]] = read_table(__file__)
MODULES = {name: module for module, names in NAMES.items() for name in names}


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


def is_ignored(name: str) -> bool:
    """Whether an entry is no parameter."""
    return BUFFERS.search(name) is not None


def is_copy(name: str) -> bool:
    """Whether a parameter is a copy of another stage's."""
    return name.startswith(COPY)


def canonical_name(name: str) -> str | None:
    """Our name of a weight whose layer is counted over the complete model; None if it is
    unknown."""
    name = PREFIX.sub("", name)
    layer = LAYER.match(name)
    prefix = layer[0] if layer else ""
    inner = re.sub(r"^attention\.", "self_attention.", name.removeprefix(prefix))
    match = KIND.fullmatch(inner)
    module = MODULES.get(match[1]) if match else None
    if match is None or module is None:
        return None
    return f"{prefix}{module}.{'weight' if match[2] == 'scale' else match[2]}"


def megatron_name(name: str, *, core: bool) -> str:
    """Megatron's name of a weight, without its layer and prefix."""
    module, _, suffix = LAYER.sub("", name).rpartition(".")
    return f"{NAMES[module][core]}{suffix}"


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
    if ".mlp.fc_in." in name and orders.gated:
        halves = [shard.chunk(2) for shard in shards]
        order = (1, 0) if orders.up_first else (0, 1)
        return torch.cat([half[index] for index in order for half in halves])
    dim = _cut_dimension(name)
    return shards[0] if dim is None or len(shards) == 1 else torch.cat(list(shards), dim=dim)


def joined_shape(name: str, shard: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The shape of `join` of so many shards of a shape."""
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
    heads, groups, rest = orders.heads // ranks, orders.groups // ranks, shard.shape[1:]
    size = orders.head_dim
    match orders.qkv:
        case QkvOrder.BLOCKS:
            parts = shard.split([heads * size, groups * size, groups * size])
        case QkvOrder.INTERLEAVED:
            parts = shard.view(heads, size, 3, *rest).unbind(2)
        case QkvOrder.GROUPED:
            per_group = heads // groups
            grouped = shard.view(groups, per_group + 2, size, *rest)
            parts = grouped.split([per_group, 1, 1], dim=1)
    return tuple(part.reshape(-1, *rest) for part in parts)
