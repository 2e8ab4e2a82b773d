"""Tensor-parallel collectives, and the backward passes of those inside autograd's graph.

A layer whose backward pass reduces gradients does so itself, alongside its other work (`linear`,
`fused_linear_cross_entropy`). In a group of size 1 the collectives are the identity and add nothing
to the graph. Knows no layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.parallel.mesh import Group


def reduce_from_group_(x: Tensor, group: Group) -> Tensor:
    """Forward: sum over the group, in place. Backward: identity.

    Args:
        x: A contiguous tensor that autograd has not saved and that nobody else uses.
        group: The group.
    """
    if group.size > 1:
        # Detached, because the sum's gradient with respect to this rank's summand is that of x.
        dist.all_reduce(x.detach(), group=group.handle)
    return x


def start_all_reduce_(x: Tensor, group: Group) -> dist.Work | None:
    """Start the sum over the group, in place; no autograd.

    Returns:
        What to wait for before x is read. None: the sum is complete.
    """
    if group.size == 1:
        return None
    if torch.compiler.is_compiling():
        # A compiled graph has no handles; its compiler overlaps the sum itself.
        dist.all_reduce(x, group=group.handle)
        return None
    work: dist.Work = dist.all_reduce(x, group=group.handle, async_op=True)
    return work


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Forward: identity, of what all ranks have. Backward: sum over the group."""
    return x if group.size == 1 else _Copy.apply(x, group)


def all_to_all(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    """Exchange rows between all ranks of a group. Backward: the exchange in the other direction.

    Args:
        x: Rows in the order of the ranks that they are for, [sum(send), ...].
        send: Rows for each rank.
        receive: Rows from each rank.
        group: The group.

    Returns:
        Rows in the order of the ranks that they are from, [sum(receive), ...].
    """
    return x if group.size == 1 else _AllToAll.apply(x, send, receive, group)


def gather_from_group(x: Tensor, group: Group) -> Tensor:
    """Forward: concatenation along the last dimension. Backward: this rank's slice."""
    return x if group.size == 1 else _Gather.apply(x, group)


def gather_slices(x: Tensor, group: Group) -> Tensor:
    """Forward: concatenation along the first dimension, of which all ranks compute the same.
    Backward: this rank's slice."""
    gathered: Tensor = _GatherSlices.apply(x, group)
    return gathered


def take_slice(x: Tensor, group: Group) -> Tensor:
    """Forward: this rank's slice of the first dimension, of what all ranks have. Backward:
    concatenation."""
    own: Tensor = _TakeSlice.apply(x, group)
    return own


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Every rank's tensor, [size, *x.shape]; no autograd."""
    if group.size == 1:
        return x.unsqueeze(0)
    gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in group.ranks]
    dist.all_gather(gathered, x.contiguous(), group=group.handle)
    return torch.stack(gathered)


def start_all_gather(x: Tensor, group: Group) -> tuple[Tensor, dist.Work | None]:
    """Start the concatenation of every rank's tensor along the first dimension; no autograd.

    Returns:
        The result, and what to wait for before it is read. None: it is complete.
    """
    gathered = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    x = x.contiguous()
    if torch.compiler.is_compiling():
        dist.all_gather_into_tensor(gathered, x, group=group.handle)
        return gathered, None
    return gathered, dist.all_gather_into_tensor(gathered, x, group=group.handle, async_op=True)


def start_reduce_scatter(x: Tensor, group: Group) -> tuple[Tensor, dist.Work | None]:
    """Start the sum over the group, of which this rank gets its slice of the first dimension.

    Args:
        x: A tensor whose first dimension is divisible by the size of the group.
        group: The group.

    Returns:
        As for `start_all_gather`.
    """
    reduced = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    x = x.contiguous()
    if torch.compiler.is_compiling():
        dist.reduce_scatter_tensor(reduced, x, group=group.handle)
        return reduced, None
    return reduced, dist.reduce_scatter_tensor(reduced, x, group=group.handle, async_op=True)


def wait(started: tuple[Tensor, dist.Work | None]) -> Tensor:
    """The result of a collective that was started."""
    result, work = started
    if work is not None:
        work.wait()
    return result


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """Forward: concatenation along the first dimension. Backward: sum over the group, and slice."""
    gathered: Tensor = _GatherSequence.apply(x, group)
    return gathered


def reduce_scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Forward: sum over the group, and this rank's slice of the first dimension. Backward:
    concatenation."""
    reduced: Tensor = _ReduceScatterSequence.apply(x, group)
    return reduced


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return wait(start_all_gather(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wait(start_reduce_scatter(grad, ctx.group)), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return wait(start_reduce_scatter(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wait(start_all_gather(grad, ctx.group)), None


class _GatherSlices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return wait(start_all_gather(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_slice(grad, ctx.group), None


class _TakeSlice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _own_slice(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return wait(start_all_gather(grad, ctx.group)), None


def _own_slice(x: Tensor, group: Group) -> Tensor:
    # A copy, because a view would keep the full tensor.
    return x.chunk(group.size)[group.rank].clone(memory_format=torch.contiguous_format)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return torch.cat(list(all_gather(x, group)), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        return grad.chunk(group.size, dim=-1)[group.rank].contiguous(), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        return reduce_from_group_(grad, ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    received = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receive, send, group=group.handle)
    return received
