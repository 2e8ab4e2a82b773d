"""Tensor-parallel collectives, with backward passes for use inside autograd's graph.

A layer whose backward pass reduces gradients does so itself, alongside its other work (`linear`,
`fused_linear_cross_entropy`). In a group of size 1 the collectives are the identity and add nothing
to the graph. Knows no layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.parallel.host_sums import HostSum
from megatron_ds.parallel.mesh import Group

T = TypeVar("T")


def reduce_from_group_(x: Tensor, group: Group) -> Tensor:
    """Forward: sum over the group, in place. Backward: identity.

    Args:
        x: A contiguous tensor that autograd has not saved and that nobody else uses.
        group: The group.
    """
    if group.size > 1:
        # Detached, because the sum's gradient with respect to this rank's summand is x's.
        values = x.detach()
        if (host_sum := _host_sum(values, group)) is not None:
            host_sum.sum_(values)
        else:
            dist.all_reduce(values, group=group.handle)
    return x


def _host_sum(x: Tensor, group: Group) -> HostSum | None:
    return group.host_sum if is_host(x.device.type) else None


def start_all_reduce_(x: Tensor, group: Group) -> dist.Work | None:
    """Start the sum over the group, in place; no autograd.

    Returns:
        What to wait for before x is read. None: the sum is complete.
    """
    if group.size == 1:
        return None
    if (host_sum := _host_sum(x, group)) is not None:
        host_sum.sum_(x)
        return None
    if torch.compiler.is_compiling():
        # A compiled graph has no handles; its compiler overlaps the sum itself.
        dist.all_reduce(x, group=group.handle)
        return None
    work: dist.Work = dist.all_reduce(x, group=group.handle, async_op=True)
    return work


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


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Every rank's tensor, [size, *x.shape]; no autograd."""
    if group.size == 1:
        return x.unsqueeze(0)
    gathered = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in group.ranks]
    dist.all_gather(gathered, x.contiguous(), group=group.handle)
    return torch.stack(gathered)


def gather_objects(value: T, group: Group | None = None) -> list[T]:
    """The picklable values of all ranks of a group, or of the run, in their order."""
    values = [value] * (dist.get_world_size() if group is None else group.size)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=None if group is None else group.handle)
    return values


def sum_over_group(x: Tensor, group: Group) -> Tensor:
    """The sum over the group in a new tensor; no autograd."""
    return reduce_from_group_(x.clone(memory_format=torch.contiguous_format), group)


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
    """Start the sum over the group; this rank gets its slice of the first dimension.

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


def _concatenate(x: Tensor, group: Group) -> Tensor:
    return wait(start_all_gather(x, group))


def _sum_slices(x: Tensor, group: Group) -> Tensor:
    return wait(start_reduce_scatter(x, group))


def _local_slice(x: Tensor, group: Group) -> Tensor:
    # A copy, because a view would keep the full tensor.
    return x.chunk(group.size)[group.rank].clone(memory_format=torch.contiguous_format)


def _concatenate_last(x: Tensor, group: Group) -> Tensor:
    return torch.cat(list(all_gather(x, group)), dim=-1)


def _local_last_slice(x: Tensor, group: Group) -> Tensor:
    return x.chunk(group.size, dim=-1)[group.rank].contiguous()


def _identity(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


Collective = Callable[[Tensor, Group], Tensor]


def in_graph(compute: Collective, gradient: Collective) -> Collective:
    """A collective in autograd's graph.

    Args:
        compute: The forward pass.
        gradient: The gradient of its input, from the gradient of its output.
    """

    class InGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
            ctx.group = group
            return compute(x, group)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return gradient(grad, ctx.group), None

    def run(x: Tensor, group: Group) -> Tensor:
        return x if group.size == 1 else InGraph.apply(x, group)

    return run


copy_to_group = in_graph(_identity, sum_over_group)
"""Identity, for a tensor that all ranks have; the gradient is summed over the group."""
sum_of_parts = in_graph(sum_over_group, sum_over_group)
"""Sum over the group, with which every rank computes a part; the parts' gradients are summed."""
gather_from_group = in_graph(_concatenate_last, _local_last_slice)
"""Concatenation along the last dimension; the gradient is this rank's slice."""
gather_slices = in_graph(_concatenate, _local_slice)
"""Concatenation along the first dimension, with which all ranks compute the same; the gradient is
this rank's slice."""
take_slice = in_graph(_local_slice, _concatenate)
"""Slice of the first dimension, of what all ranks have; the gradient is concatenated."""
gather_sequence = in_graph(_concatenate, _sum_slices)
"""Concatenation along the first dimension; the gradient is summed over the group, and sliced."""
reduce_scatter_sequence = in_graph(_sum_slices, _concatenate)
"""Sum over the group, sliced along the first dimension; the gradient is concatenated."""


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
        ctx.send = send
        ctx.receive = receive
        ctx.group = group
        return _exchange(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _exchange(x: Tensor, send: list[int], receive: list[int], group: Group) -> Tensor:
    received = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(received, x.contiguous(), receive, send, group=group.handle)
    return received
