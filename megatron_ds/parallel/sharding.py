"""Builds parameters from their declarations: this rank's shard, with values and marks.

The declaration is attached to the parameter. Gradient norms, optimizers and checkpoints read it and
guess nothing from names. Also sets the marks by which DeepSpeed
distinguishes sharded from replicated parameters when it sums gradient norms, and experts from
parameters that all data-parallel ranks have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.parallel.collectives import sum_over_group
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.weights import Partial, Role, ShardSpec, Weight

Init = Callable[[tuple[int, ...], int, Sequence[range]], Tensor]
"""Initial values of part of a parameter, fp32. Takes the full shape, a dimension, and ranges of
this dimension; returns the values of these ranges, concatenated along it."""


class Draws(Protocol):
    """Draws initial weights, which are the same in every layout."""

    def normal(self, name: str, std: float) -> Init:
        """Return a function that draws normal(0, std) values for the parameter of this name."""
        ...

    def uniform(self, name: str, std: float) -> Init:
        """Return the same for values of a uniform distribution around 0 with this deviation."""
        ...


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


def shard_spec(param: Tensor) -> ShardSpec | None:
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


def expert_group(param: Tensor) -> str | None:
    """Name of the group of a parameter that `mark_experts` has marked; None for others."""
    name: str | None = getattr(param, "group_name", None)
    return name


def declare(
    param: torch.nn.Parameter,
    weight: Weight,
    tp: Group,
    ep_size: int = 1,
    *,
    is_whole: bool = False,
) -> None:
    """Mark a parameter as this rank's shard of a weight, and complete its gradients.

    Partial gradients are all-reduced as autograd computes them, before they are accumulated: an
    engine that reduces or partitions gradients gets complete ones, at any ZeRO stage. A replicated
    parameter still counts once in norms.

    Args:
        param: The parameter.
        weight: Its declaration, with the canonical name.
        tp: Tensor-parallel group.
        ep_size: Expert-parallel size.
        is_whole: Whether the tensor-parallel ranks hold different experts of their expert-parallel
            rank.
    """
    param.declaration = weight  # type: ignore[attr-defined]
    expert_shard = ShardSpec(0, (weight.shape[0] // ep_size,) * ep_size)
    if (shard := expert_shard if is_whole else weight.shard) is not None:
        mark_sharded(param, shard)
    if weight.is_stacked:
        mark_experts(param, ep_size)
    is_partial = {Partial.ALWAYS: tp.size > 1, Partial.SEQUENCE: tp.sequence_parallel}
    if is_partial.get(weight.partial_over, False):
        # In a new tensor: a hook must not change its argument.
        param.register_hook(partial(sum_over_group, group=tp))


def declaration(name: str, param: torch.nn.Parameter) -> Weight:
    """The declaration of a parameter; a program's own layer has matrices and vectors.

    Args:
        name: Canonical name.
        param: The parameter.
    """
    # ZeRO-3 leaves an empty tensor in place of a partitioned parameter.
    shape = tuple(getattr(param, "ds_shape", param.shape))
    is_matrix = len(shape) > 1 and not name.endswith(".bias")
    inferred = Weight(name, shape, role=Role.MATRIX if is_matrix else Role.VECTOR)
    weight: Weight = getattr(param, "declaration", inferred)
    return weight


class StatefulModule(nn.Module):
    """A module that may have state: buffers in fp32, whatever type the parameters are given."""

    def declare_states(self, weights: Iterable[Weight]) -> None:
        """Register the buffers of the weights that are states, with their initial values."""
        for weight in weights:
            if weight.role is Role.STATE:
                # The context of deepspeed.zero.Init makes torch.full return the run's type.
                values = torch.full(weight.shape, weight.mean).float()
                self.register_buffer(weight.name.rpartition(".")[2], values)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module or change its type, as torch calls it."""
        states = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, state in states.items():
            if state is not None and (changed := self._buffers[name]) is not None:
                self._buffers[name] = state.to(changed.device)
        return self


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """The states of a model's layers by canonical name: its persistent buffers."""
    saved = model.state_dict()
    return {name: state for name, state in model.named_buffers() if name in saved}


def declared_parameter(
    weight: Weight, tp: Group, init: Draws, ep: Group | None = None, *, is_whole: bool = False
) -> torch.nn.Parameter:
    """This rank's part of a weight, with its initial values.

    Args:
        weight: The declaration, with the canonical name.
        tp: Tensor-parallel group.
        init: Draws the initial values.
        ep: Expert-parallel group, for experts.
        is_whole: See `declare`.
    """
    ep_rank, ep_size = (0, 1) if ep is None else (ep.rank, ep.size)
    first = int(weight.is_stacked)
    names = [weight.name]
    padding = 0
    spec = weight.shard or ShardSpec(first, (weight.shape[first],))
    ranges = spec.ranges(*(tp.rank, tp.size) if weight.shard and not is_whole else (0, 1))
    if weight.is_stacked:  # each expert is drawn by its number
        if is_whole:
            ep_rank = ep_rank * tp.size + tp.rank
            ep_size *= tp.size
        local = weight.shape[0] // ep_size
        experts = range(ep_rank * local, (ep_rank + 1) * local)
        names = [weight.name.replace("experts.", f"experts.{expert}.") for expert in experts]
    shape = (weight.shape[first] - weight.padding, *weight.shape[first + 1 :])
    if weight.padding:
        drawn = [range(min(rows.start, shape[0]), min(rows.stop, shape[0])) for rows in ranges]
        padding = sum(map(len, ranges)) - sum(map(len, drawn))
        ranges = drawn

    def values(name: str) -> Tensor:
        if weight.std:
            draw = init.uniform if weight.is_uniform else init.normal
            drawn = draw(name, weight.std)(shape, spec.dim - first, ranges)
        else:
            size = list(shape)
            size[spec.dim - first] = sum(map(len, ranges))
            drawn = torch.full(size, weight.mean)
        return F.pad(drawn, (*(0, 0) * (drawn.dim() - 1), 0, padding)) if padding else drawn

    parts = [values(name) for name in names]
    initial = torch.stack(parts) if weight.is_stacked else parts[0]
    # The context determines type and device of torch.empty: deepspeed.zero.Init builds parameters
    # in the run's precision on the accelerator.
    param = torch.nn.Parameter(torch.empty(initial.shape))
    with torch.no_grad():
        param.copy_(initial)
    declare(param, weight, tp, 1 if ep is None else ep.size, is_whole=is_whole)
    return param
