"""Tensor-parallel collectives with their conjugate backward passes.

Names are those of Megatron-LM (Shoeybi et al. 2019, section 3): copy and reduce, each the other's
backward, and gather, whose backward is a split. In a group of size 1 they are the identity and add
nothing to the autograd graph. Knows no layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.parallel.mesh import Group


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Forward: identity. Backward: sum of the gradients over the group."""
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Forward: sum over the group. Backward: identity."""
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_from_group(x: Tensor, group: Group) -> Tensor:
    """Forward: concatenation along the last dimension. Backward: this rank's slice."""
    return x if group.size == 1 else _Gather.apply(x, group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, into a new tensor; no autograd."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group.handle)
    return total


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Every rank's tensor, [size, *x.shape]; no autograd."""
    if group.size == 1:
        return x.unsqueeze(0)
    gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in group.ranks]
    dist.all_gather(gathered, x.contiguous(), group=group.handle)
    return torch.stack(gathered)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.cat(list(all_gather(x, group)), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        return grad.chunk(group.size, dim=-1)[group.rank].contiguous(), None
