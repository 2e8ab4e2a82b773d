"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3).

Column-parallel: the output features are sharded, the input is replicated. Row-parallel: the input
features are sharded, the output is replicated. One after the other, they need one all-reduce over
the group in each direction. In the backward pass it is overlapped with the product for the weight's
gradient. With sequence parallelism, the input of the one and the output of the other are sharded
along their first dimension, and each all-reduce is an all-gather and a reduce-scatter. Owns no
initial values: `init` draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.parallel.collectives import (
    reduce_from_group_,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    wait,
)
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import Draws, declared_parameter
from megatron_ds.parallel.weights import Weight

Product = Callable[[Tensor, Tensor | None], Tensor]
"""x W^T + b of a weight in another form, for x and b."""
TrainingProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""The output of a layer, with what its group communicates, for x, W and b."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, product: Product | None) -> Tensor:
    """x W^T + b, by the product if there is one."""
    return F.linear(x, weight, bias) if product is None else product(x, bias)


class _ParallelLinear(nn.Module):
    product: Product | None = None
    """Takes the place of the weight, without gradients and sequence parallelism."""
    sharded_dim: ClassVar[int]
    """Dimension of the weight that is sharded over the group."""
    training_product: TrainingProduct | None = None
    """Computes the layer in training, in another number format."""

    def __init__(
        self, weight: Weight, bias: Weight | None = None, *, group: Group, init: Draws
    ) -> None:
        super().__init__()
        self.group = group
        self.full_shape = weight.shape
        """[out, in] of all ranks."""
        self.weight = declared_parameter(weight, group, init)
        self.bias = None if bias is None else declared_parameter(bias, group, init)


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + b with the rows of W sharded: [..., in] -> [..., out / group size].

    Args:
        weight: Matrix [out, in]. Its sections, e.g. (q, k, v), are each sharded evenly.
        bias: Vector [out]; None for a layer without bias.
        group: Tensor-parallel group.
        init: Draws the initial values.
    """

    sharded_dim = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.training_product is not None:
            return self.training_product(x, self.weight, self.bias)
        if self.group.size == 1 or self.product is not None:
            return multiply(x, self.weight, self.bias, self.product)
        y: Tensor = _ColumnParallel.apply(x, self.weight, self.bias, self.group)
        return y


class RowParallelLinear(_ParallelLinear):
    """y = x W^T + b with the columns of W sharded: [..., in / group size] -> [..., out].

    The bias is replicated. Arguments as for `ColumnParallelLinear`.
    """

    sharded_dim = 1

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.training_product is not None:
            return self.training_product(x, self.weight, self.bias)
        if self.group.size == 1:
            return multiply(x, self.weight, self.bias, self.product)
        if self.group.sequence_parallel:
            part: Tensor = _RowParallelToSequence.apply(x, self.weight, self.bias, self.group)
            return part
        # The bias is added after the reduction, so that it counts once.
        y = reduce_from_group_(multiply(x, self.weight, None, self.product), self.group)
        return y if self.bias is None else y + self.bias


class ReplicatedLinear(nn.Module):
    """x W^T + b, with a weight that every rank has."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class _ColumnParallel(torch.autograd.Function):
    """F.linear whose input has the same value on every rank of a group, or is sharded over it.

    A sharded input is gathered again in the backward pass, so that only the shard is stored.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        if group.sequence_parallel:
            x = wait(start_all_gather(x, group))
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        is_sharded = ctx.group.sequence_parallel
        grad_x = None
        grad_weight = None
        grad_bias = None
        work = None
        gathered = None
        if is_sharded and needs_weight:
            gathered = start_all_gather(x, ctx.group)
        if needs_x:
            grad_x = (rows @ weight).view(*grad.shape[:-1], x.shape[-1])
            if is_sharded:
                grad_x, work = start_reduce_scatter(grad_x, ctx.group)
            else:
                work = start_all_reduce_(grad_x, ctx.group)
        if needs_weight:
            full = x if gathered is None else wait(gathered)
            grad_weight = rows.t() @ full.flatten(0, -2)
        if needs_bias:
            grad_bias = rows.sum(0)
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowParallelToSequence(torch.autograd.Function):
    """Sum over a group of each rank's F.linear, sharded along the first dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        y = wait(start_reduce_scatter(F.linear(x, weight), group))
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = wait(start_all_gather(grad, ctx.group)).flatten(0, -2)
        grad_x = (rows @ weight).view(x.shape) if needs_x else None
        grad_weight = rows.t() @ x.flatten(0, -2) if needs_weight else None
        # Of the full sequence, as the gradients of all replicated parameters must be.
        grad_bias = rows.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None
