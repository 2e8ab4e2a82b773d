"""The four tensor-parallel collectives as conjugate autograd pairs.

Names and pairs are those of Megatron-LM (Shoeybi et al. 2019, section 3): copy/reduce and
split/gather, each the other's backward. In a group of one they are the identity and leave no trace
in the graph. Knows no layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_ds.parallel.mesh import Group


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: identity. Backward: sum of the gradients over the group."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: sum over the group. Backward: identity."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_from_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: concatenation of the ranks' tensors along the last dimension. Backward: this rank's
    slice.
    """
    return x if group.size == 1 else _Gather.apply(x, group)


def split_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Forward: this rank's slice of the last dimension. Backward: concatenation."""
    return x if group.size == 1 else _Split.apply(x, group)


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group, into a tensor of its own; no autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.handle)
    return total


def all_gather(x: torch.Tensor, group: Group) -> torch.Tensor:
    """[size, *x.shape]: every rank's tensor; no autograd."""
    if group.size == 1:
        return x.unsqueeze(0)
    gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in group.ranks]
    dist.all_gather(gathered, x.contiguous(), group=group.handle)
    return torch.stack(gathered)


def _concatenate(x: torch.Tensor, group: Group) -> torch.Tensor:
    return torch.cat(list(all_gather(x, group)), dim=-1)


def _slice(x: torch.Tensor, group: Group) -> torch.Tensor:
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _concatenate(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _slice(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return _slice(x, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _concatenate(grad, ctx.group), None
