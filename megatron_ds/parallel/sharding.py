"""How a parameter is cut over tensor-parallel ranks: declared where it is born, read by everyone
else.

Norms, checkpoints and conversions read the declaration and guess nothing from names. This file also
sets the mark by which DeepSpeed tells sharded from replicated parameters when it sums gradient
norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ShardSpec:
    """A cut along one dimension, made of sections that are each split evenly over the ranks.

    Rank i holds the concatenation of the i-th slice of every section: a fused [Q; K; V] or [gate;
    up] matrix thus gives every rank its own slice of each part.
    """

    dim: int
    sections: tuple[int, ...]
    """Sizes along `dim`; their sum is the full size."""

    def check(self, size: int) -> None:
        """Raise ValueError if a section cannot be split over `size` ranks."""
        for section in self.sections:
            if section % size:
                raise ValueError(
                    f"a section of {section} rows or columns cannot be split over {size} "
                    "tensor-parallel ranks"
                )


def take_shard(full: torch.Tensor, spec: ShardSpec, rank: int, size: int) -> torch.Tensor:
    """The part of a full tensor that `rank` of `size` holds."""
    spec.check(size)
    sections = full.split(list(spec.sections), dim=spec.dim)
    slices = [section.chunk(size, dim=spec.dim)[rank] for section in sections]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=spec.dim)


def unshard(shards: Sequence[torch.Tensor], spec: ShardSpec) -> torch.Tensor:
    """The full tensor of all ranks' parts, in rank order: the inverse of `shard_of`."""
    size = len(shards)
    spec.check(size)
    local = [section // size for section in spec.sections]
    parts = [shard.split(local, dim=spec.dim) for shard in shards]
    ordered = [part[index] for index in range(len(local)) for part in parts]
    return torch.cat(ordered, dim=spec.dim)


def mark_sharded(param: torch.nn.Parameter, spec: ShardSpec) -> None:
    """Mark a parameter as this rank's part of a larger one."""
    param.shard_spec = spec  # type: ignore[attr-defined]
    # DeepSpeed counts an unmarked parameter's gradient norm on tensor-parallel rank 0 alone.
    param.tensor_model_parallel = True  # type: ignore[attr-defined]


def shard_spec(param: torch.nn.Parameter) -> ShardSpec | None:
    """The declaration, or None for a replicated parameter."""
    spec: ShardSpec | None = getattr(param, "shard_spec", None)
    return spec


def sharded_parameter(
    full: torch.Tensor, spec: ShardSpec, rank: int, size: int
) -> torch.nn.Parameter:
    """A declared parameter that holds this rank's part of `full`.

    The storage comes from torch.empty, so that its type and device are those of the surrounding
    context (deepspeed.zero.Init builds in bf16 on the accelerator).
    """
    part = take_shard(full, spec, rank, size)
    param = torch.nn.Parameter(torch.empty(part.shape))
    with torch.no_grad():
        param.copy_(part)
    mark_sharded(param, spec)
    return param
