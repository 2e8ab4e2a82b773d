"""The products of a linear layer in fp8, in the forward and the backward pass.

Of y = x W^T, x and W are rounded to E4M3; of dx = g W and dW = g^T x also g, to E4M3 or E5M2. Each
operand is rounded anew along the dimension of a sum if the scales are of rows. Scales come from the
numbers themselves. Ranks that have parts of a scale's range agree on it, so that the rounded
numbers are those of one process: tensor-parallel ranks where the range contains a sharded
dimension, and ranks with slices of the same sequences where it contains the tokens. Blocks are of
one rank. Micro-batches have scales of their own. The gradient of the bias is a sum of what is not
rounded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from megatron_ds.parallel.collectives import (
    reduce_from_group_,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    wait,
)
from megatron_ds.parallel.fp8.casts import EAGER, EAGER_PARTS, Casts, PartCasts
from megatron_ds.parallel.fp8.rounding import (
    E4M3,
    Block,
    Dims,
    Rounded,
    is_shared,
    largest_of_ranks,
    multiply,
    paired,
)
from megatron_ds.parallel.mesh import Group

Kept = TypeVar("Kept")
Groups = tuple[tuple[Group, ...], ...]
"""Groups whose ranks share the scales of each dimension."""


BOTH = (-1, -2)
"""Dimensions of a matrix."""


class RoundedWeights:
    """Keeps the rounded weights of a model's layers during a step, in which none changes."""

    def __init__(self) -> None:
        self._kept: dict[int, Any] | None = None
        self.prepared: set[Fp8Linear] = set()
        """Layers that hold rounded weights for their graphs."""

    @property
    def is_keeping(self) -> bool:
        return self._kept is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it, each weight is rounded once, along both dimensions."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None
            for layer in self.prepared:
                layer.rounded = None
            self.prepared.clear()

    def take(self, owner: object, compute: Callable[[], Kept]) -> Kept:
        """What `compute` returns for a layer, which is called if the result is not kept.

        Args:
            owner: The layer.
            compute: Rounds the weight.
        """
        assert self._kept is not None
        if id(owner) not in self._kept:
            self._kept[id(owner)] = compute()
        kept: Kept = self._kept[id(owner)]
        return kept


@dataclass
class Fp8Recipe:
    """How the layers of a model are rounded."""

    gradients: torch.dtype
    """Format of the gradients."""
    by_row: bool
    """One scale for each row or column, not one for the tensor."""
    tokens: Group
    """Ranks that have slices of the same sequences."""
    weights: RoundedWeights = field(default_factory=RoundedWeights)
    block: int | None = None
    """Length of the blocks of rows that have scales, and side of those of weights. None: no blocks
    have."""

    casts: Casts = EAGER
    """Round activations and gradients; compiled functions on a device."""
    weight_casts: Casts = EAGER
    """Round weights, likewise."""
    part_casts: PartCasts = EAGER_PARTS
    """Round the rows of experts, likewise."""

    def round(
        self, x: Tensor, dims: Dims, dtype: torch.dtype, block: Block | None, groups: Groups
    ) -> list[Rounded]:
        """Round activations or gradients along some dimensions.

        Args:
            x: [tokens, features].
            dims: Dimensions along which products are summed: -1, -2 or both.
            dtype: Format.
            block: Rows and columns of the blocks that have scales.
            groups: For each dimension, groups whose ranks have parts of its ranges; one scale of
                the tensor is that of the first dimension.
        """
        # In a graph they are compiled with the rest.
        casts = EAGER if torch.compiler.is_compiling() else self.casts
        return self._round(casts, x, dims, dtype, block, groups)

    def round_weight(
        self, weight: Tensor, dims: Dims, block: Block | None, groups: Groups
    ) -> list[Rounded]:
        """Round the weight of a layer, or stacked ones [e, O, I]; see `round`."""
        return self._round(self.weight_casts, weight.detach(), dims, E4M3, block, groups)

    def _round(
        self,
        casts: Casts,
        x: Tensor,
        dims: Dims,
        dtype: torch.dtype,
        block: Block | None,
        groups: Groups,
    ) -> list[Rounded]:
        shared = groups if self.by_row else groups[:1]
        if block is not None or not is_shared(itertools.chain(*shared)):
            return paired(casts.round_along(x, dims, dtype, self.by_row, block), block)
        largest = casts.largest_values(x, dims, self.by_row)
        for amax, ranks in zip(largest, shared, strict=True):
            largest_of_ranks(amax, ranks)
        return paired(casts.cast(x, largest, dims, dtype), None)


class Fp8Linear:
    """x W^T + b of a linear layer: [..., in] to [..., out].

    Args:
        recipe: How it is rounded.
        group: Tensor-parallel group.
        sharded: Dimension of W that is sharded over it: 0 for a column-parallel layer, 1 for a
            row-parallel one.
    """

    def __init__(self, recipe: Fp8Recipe, group: Group, sharded: int) -> None:
        self.recipe = recipe
        self.group = group
        self.sharded = sharded
        self.rounded: tuple[Rounded, Rounded] | None = None
        """W and W^T, rounded before the graph of a compiled layer."""

    def prepare(self, weight: Tensor) -> None:
        """Round a weight for the graph of a compiled layer, which is called next."""
        weights = self.recipe.weights
        if self.rounded is not None and weights.is_keeping:
            return
        by_input = self.round_weight(weight, 1)
        by_output = self.round_weight(weight, 0)
        if by_output.scale is by_input.scale:  # a graph takes no tensor twice
            by_output = replace(by_output, scale=by_output.scale.clone())
        self.rounded = by_input, by_output
        weights.prepared.add(self)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, as that of `ColumnParallelLinear` and `RowParallelLinear`."""
        if self.rounded is None:
            y: Tensor = self._multiply(x, weight, bias)
            return y
        return self._multiply_prepared(x, weight, bias, *self.rounded)

    @_disable_dynamo  # kept weights change in no graph
    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _Fp8Product.apply(x, weight, bias, self, self._keeps_codes(weight))
        return y

    def _multiply_prepared(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, by_input: Rounded, by_output: Rounded
    ) -> Tensor:
        rounded = by_input.codes, by_input.scale, by_output.codes, by_output.scale
        keeps_codes = self._keeps_codes(weight)
        y: Tensor = _Fp8Product.apply(x, weight, bias, self, keeps_codes, *rounded)
        return y

    def _keeps_codes(self, weight: Tensor) -> bool:
        # What is gathered for the product is gathered again for the gradient.
        is_gathered = self.is_column and self.group.sequence_parallel
        return torch.is_grad_enabled() and weight.requires_grad and not is_gathered

    @property
    def block_of_weights(self) -> Block | None:
        """Rows and columns of the blocks of W that have scales."""
        block = self.recipe.block
        return None if block is None else (block, block)

    @property
    def is_column(self) -> bool:
        return self.group.size > 1 and self.sharded == 0

    @property
    def is_row(self) -> bool:
        return self.group.size > 1 and self.sharded == 1

    def round_weight(self, weight: Tensor, dim: int) -> Rounded:
        """W, or W^T, rounded along a dimension of W."""
        weights = self.recipe.weights
        if not weights.is_keeping:
            return self._round_weight(weight, (dim,))[0]
        both = weights.take(self, lambda: self._round_weight(weight, (1, 0)))
        return both[1 - dim]

    def _round_weight(self, weight: Tensor, dims: Dims) -> list[Rounded]:
        recipe = self.recipe
        groups = tuple(
            (self.group,) if not recipe.by_row or dim == self.sharded else () for dim in dims
        )
        from_last = tuple(dim - 2 for dim in dims)
        return recipe.round_weight(weight, from_last, self.block_of_weights, groups)

    def round_along(
        self, rows: Tensor, dims: Dims, dtype: torch.dtype, *, is_sharded: bool
    ) -> list[Rounded]:
        """Activations or gradients [tokens, features], rounded along each of some dimensions.

        Args:
            rows: The numbers.
            dims: -1, along the features, -2, along the tokens, transposed, or both.
            dtype: Format.
            is_sharded: Whether the features are sharded over the tensor-parallel group.
        """
        recipe = self.recipe
        block = None if recipe.block is None else (1, recipe.block)
        of_features = (self.group,) if is_sharded else ()
        if recipe.by_row:
            groups = tuple(of_features if dim == -1 else (recipe.tokens,) for dim in dims)
        else:
            groups = ((*of_features, recipe.tokens),)
        return recipe.round(rows, dims, dtype, block, groups)

    def forward(
        self, x: Tensor, weight: Rounded, bias: Tensor | None, *, keeps_codes: bool
    ) -> tuple[Tensor, Rounded | None]:
        """The forward pass for the rounded W: the output, and x rounded for the gradient of W if it
        is kept."""
        if self.is_column and self.group.sequence_parallel:
            x = wait(start_all_gather(x, self.group))
        flat = x.flatten(0, -2)
        inputs = None
        if keeps_codes:
            rows, inputs = self.round_along(flat, BOTH, E4M3, is_sharded=self.is_row)
        else:
            (rows,) = self.round_along(flat, (-1,), E4M3, is_sharded=self.is_row)
        y = self._sum(rows, x, weight, bias)
        return y, inputs

    def _sum(self, rows: Rounded, x: Tensor, weight: Rounded, bias: Tensor | None) -> Tensor:
        added = None if self.is_row else bias
        y = multiply(rows, weight, added, x.dtype)
        y = y.view(*x.shape[:-1], -1)
        if not self.is_row:
            return y
        if self.group.sequence_parallel:
            y = wait(start_reduce_scatter(y, self.group))
        else:
            y = reduce_from_group_(y, self.group)
        return y if bias is None else y + bias

    def backward(
        self,
        grad: Tensor,
        x: Tensor | Rounded,
        weight: Callable[[], Rounded],
        needs: tuple[bool, ...],
        dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, W and b that are needed, for x or what `forward` kept of it, and a
        function that rounds W^T; `dtype` is the type of the gradient of W."""
        group = self.group
        is_split = group.sequence_parallel
        gathered = None
        if self.is_column and is_split and needs[1] and isinstance(x, Tensor):
            gathered = start_all_gather(x, group)
        if self.is_row and is_split:
            grad = wait(start_all_gather(grad, group))
        gradients = self.recipe.gradients
        rows = grad.flatten(0, -2)
        grad_x = None
        grad_weight = None
        grad_bias = None
        work: dist.Work | None = None
        dims = tuple(dim for dim, is_needed in zip(BOTH, needs[:2], strict=True) if is_needed)
        rounded = self.round_along(rows, dims, gradients, is_sharded=self.is_column) if dims else []
        if needs[0]:
            product = multiply(rounded[0], weight(), None, grad.dtype)
            grad_x = product.view(*grad.shape[:-1], -1)
            if self.is_column and is_split:
                grad_x, work = start_reduce_scatter(grad_x, group)
            elif self.is_column:
                work = start_all_reduce_(grad_x, group)
        if needs[1]:
            inputs = x
            if isinstance(inputs, Tensor):
                full = (inputs if gathered is None else wait(gathered)).flatten(0, -2)
                (inputs,) = self.round_along(full, (-2,), E4M3, is_sharded=self.is_row)
            grad_weight = multiply(rounded[-1], inputs, None, dtype)
        if needs[2]:
            grad_bias = rows.sum(0)
        if work is not None:
            work.wait()
        return grad_x, grad_weight, grad_bias


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Fp8Linear,
        keeps_codes: bool,
        *rounded: Tensor,
    ) -> Tensor:
        """Codes and scale of W, then of W^T, are those of `rounded`, or else of `layer`."""
        if rounded:
            by_input = Rounded(rounded[0], rounded[1], layer.block_of_weights)
        else:
            by_input = layer.round_weight(weight, 1)
        y, inputs = layer.forward(x, by_input, bias, keeps_codes=keeps_codes)
        kept = (x,) if inputs is None else (inputs.codes, inputs.scale)
        ctx.save_for_backward(weight, *rounded[2:], *kept)
        ctx.input_block = None if inputs is None else inputs.block
        ctx.layer = layer
        ctx.is_prepared = bool(rounded)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Fp8Linear = ctx.layer
        weight, *saved = ctx.saved_tensors
        others = saved[2:] if ctx.is_prepared else saved
        x = others[0]
        if len(others) > 1:
            x = Rounded(others[0], others[1], ctx.input_block)

        def by_output() -> Rounded:
            if ctx.is_prepared:
                return Rounded(saved[0], saved[1], layer.block_of_weights)
            return layer.round_weight(weight, 0)

        gradients = layer.backward(grad, x, by_output, ctx.needs_input_grad[:3], weight.dtype)
        return *gradients, None, None, *([None] * (4 if ctx.is_prepared else 0))
