"""Declaration of how a parameter is sharded over tensor-parallel and expert-parallel ranks.

It is attached to a parameter when that is created. Gradient norms, checkpoints and
conversions read it and guess nothing from names. Also sets the marks by which DeepSpeed
distinguishes sharded from replicated parameters when it sums gradient norms, and experts from
parameters that all data-parallel ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ds.parallel.weights import ShardSpec

Init = Callable[[tuple[int, ...], int, Sequence[range]], Tensor]
"""Initial values of part of a parameter, fp32. Takes the full shape, a dimension, and ranges of
this dimension; returns the values of these ranges, concatenated along it."""


def take_shard(full: Tensor, spec: ShardSpec, rank: int, size: int) -> Tensor:
    """The shard of a full tensor that `rank` of `size` holds."""
    slices = [full.narrow(spec.dim, rows.start, len(rows)) for rows in spec.ranges(rank, size)]
    return slices[0] if len(slices) == 1 else torch.cat(slices, dim=spec.dim)


def unshard(shards: Sequence[Tensor], spec: ShardSpec) -> Tensor:
    """The full tensor of all ranks' shards, in rank order: the inverse of `take_shard`."""
    size = len(shards)
    spec.check(size)
    local = [section // size for section in spec.sections]
    parts = [shard.split(local, dim=spec.dim) for shard in shards]
    ordered = [part[index] for index in range(len(local)) for part in parts]
    return torch.cat(ordered, dim=spec.dim)


def mark_sharded(param: torch.nn.Parameter, spec: ShardSpec) -> None:
    """Mark a parameter as this rank's shard."""
    param.shard_spec = spec  # type: ignore[attr-defined]
    # DeepSpeed counts the gradient norm of an unmarked parameter on tensor-parallel rank 0 only.
    param.tensor_model_parallel = True  # type: ignore[attr-defined]


def shard_spec(param: torch.nn.Parameter) -> ShardSpec | None:
    """Declaration of a sharded parameter; None if it is replicated."""
    spec: ShardSpec | None = getattr(param, "shard_spec", None)
    return spec


def mark_experts(param: torch.nn.Parameter, ep_size: int) -> None:
    """Mark a parameter as the experts of this rank, stacked along dimension 0.

    Without expert parallelism every data-parallel rank has all experts: a parameter like others.
    """
    if ep_size > 1:
        # DeepSpeed averages such a parameter's gradient over the group of this name.
        param.allreduce = False  # type: ignore[attr-defined]
        param.group_name = expert_group_name(ep_size)  # type: ignore[attr-defined]


def expert_group_name(ep_size: int) -> str:
    """DeepSpeed's name of the process groups of an expert-parallel size."""
    return f"ep_size_{ep_size}"


def expert_group(param: torch.nn.Parameter) -> str | None:
    """Name of the group of a parameter that `mark_experts` has marked; None for others."""
    name: str | None = getattr(param, "group_name", None)
    return name


def sharded_parameter(shard: Tensor, spec: ShardSpec) -> torch.nn.Parameter:
    """A marked parameter with the values of this rank's shard."""
    # The context determines type and device of torch.empty: deepspeed.zero.Init builds parameters
    # in the run's precision on the accelerator.
    param = torch.nn.Parameter(torch.empty(shard.shape))
    with torch.no_grad():
        param.copy_(shard)
    mark_sharded(param, spec)
    return param
