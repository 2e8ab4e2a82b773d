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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.parallel.collectives import (
    reduce_from_group_,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    wait,
)
from megatron_ds.parallel.fp8.rounding import (
    E4M3,
    RoundBoth,
    Rounded,
    multiply,
    round_blocks,
    round_both,
    round_matrix,
)
from megatron_ds.parallel.mesh import Group


class RoundedWeights:
    """Keeps the rounded weights of a model's layers during a step, in which none changes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Rounded] | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it, each weight is rounded once along each dimension."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    def take(self, owner: object, dim: int, compute: Callable[[], Rounded]) -> Rounded:
        """The rounded weight of a layer along a dimension, which is computed if it is not kept."""
        if self._kept is None:
            return compute()
        key = id(owner), dim
        if key not in self._kept:
            self._kept[key] = compute()
        return self._kept[key]


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

    round_both: RoundBoth = round_both
    """Rounds what is alone on its rank; a compiled function on a device."""


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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # kept weights change in no graph
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output, as that of `ColumnParallelLinear` and `RowParallelLinear`."""
        # What is gathered for the product is gathered again for the gradient.
        is_gathered = self.is_column and self.group.sequence_parallel
        keeps_codes = torch.is_grad_enabled() and weight.requires_grad and not is_gathered
        y: Tensor = _Fp8Product.apply(x, weight, bias, self, keeps_codes)
        return y

    @property
    def is_column(self) -> bool:
        return self.group.size > 1 and self.sharded == 0

    @property
    def is_row(self) -> bool:
        return self.group.size > 1 and self.sharded == 1

    def round_weight(self, weight: Tensor, dim: int) -> Rounded:
        """W, or W^T, rounded along a dimension of W."""
        recipe = self.recipe

        def compute() -> Rounded:
            if dim == 0 and not recipe.by_row:
                return self.round_weight(weight, 1).transposed()
            if recipe.block is not None:
                return round_blocks(weight, E4M3, (recipe.block, recipe.block))
            is_shared = not recipe.by_row or dim == self.sharded
            groups = (self.group,) if is_shared else ()
            return round_matrix(weight, dim, E4M3, by_row=recipe.by_row, groups=groups)

        return recipe.weights.take(self, dim, compute)

    def round_rows(self, rows: Tensor, dtype: torch.dtype, *, is_sharded: bool) -> Rounded:
        """Activations or gradients [tokens, features], rounded along the features.

        Args:
            rows: The numbers.
            dtype: Format.
            is_sharded: Whether the features are sharded over the tensor-parallel group.
        """
        recipe = self.recipe
        if recipe.block is not None:
            return round_blocks(rows, dtype, (1, recipe.block))
        groups = [self.group] if is_sharded else []
        if not recipe.by_row:
            groups.append(recipe.tokens)
        return round_matrix(rows, 1, dtype, by_row=recipe.by_row, groups=groups)

    def round_columns(self, rows: Tensor, dtype: torch.dtype, *, is_sharded: bool) -> Rounded:
        """The same rounded along the tokens, transposed: [features, tokens]."""
        recipe = self.recipe
        if recipe.block is not None:
            return round_blocks(rows.t(), dtype, (1, recipe.block))
        if not recipe.by_row:
            return self.round_rows(rows, dtype, is_sharded=is_sharded).transposed()
        return round_matrix(rows, 0, dtype, by_row=True, groups=(recipe.tokens,))

    def round_pair(
        self, rows: Tensor, dtype: torch.dtype, *, is_sharded: bool
    ) -> tuple[Rounded, Rounded]:
        """The results of `round_rows` and `round_columns`, from one reading where that suffices."""
        recipe = self.recipe
        shares = (is_sharded and self.group.size > 1) or recipe.tokens.size > 1
        if recipe.block is None and shares:
            by_token = self.round_rows(rows, dtype, is_sharded=is_sharded)
            if not recipe.by_row:
                return by_token, by_token.transposed()
            return by_token, self.round_columns(rows, dtype, is_sharded=is_sharded)
        block = None if recipe.block is None else (1, recipe.block)
        codes, scale, columns, column_scale = recipe.round_both(
            rows, dtype, recipe.by_row, recipe.block
        )
        return Rounded(codes, scale, block), Rounded(columns, column_scale, block)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, keeps_codes: bool
    ) -> tuple[Tensor, Rounded | None]:
        """The forward pass: the output, and x rounded for the gradient of W if it is kept."""
        if self.is_column and self.group.sequence_parallel:
            x = wait(start_all_gather(x, self.group))
        flat = x.flatten(0, -2)
        inputs = None
        if keeps_codes:
            rows, inputs = self.round_pair(flat, E4M3, is_sharded=self.is_row)
        else:
            rows = self.round_rows(flat, E4M3, is_sharded=self.is_row)
        y = self._sum(rows, x, weight, bias)
        return y, inputs

    def _sum(self, rows: Rounded, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        added = None if self.is_row else bias
        y = multiply(rows, self.round_weight(weight, 1), added, x.dtype)
        y = y.view(*x.shape[:-1], -1)
        if not self.is_row:
            return y
        if self.group.sequence_parallel:
            y = wait(start_reduce_scatter(y, self.group))
        else:
            y = reduce_from_group_(y, self.group)
        return y if bias is None else y + bias

    def backward(
        self, grad: Tensor, x: Tensor | Rounded, weight: Tensor, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, W and b that are needed, for x or what `forward` kept of it."""
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
        by_feature: Rounded | None = None
        if needs[0]:
            if needs[1]:
                pair = self.round_pair(rows, gradients, is_sharded=self.is_column)
                by_token, by_feature = pair
            else:
                by_token = self.round_rows(rows, gradients, is_sharded=self.is_column)
            product = multiply(by_token, self.round_weight(weight, 0), None, grad.dtype)
            grad_x = product.view(*grad.shape[:-1], -1)
            if self.is_column and is_split:
                grad_x, work = start_reduce_scatter(grad_x, group)
            elif self.is_column:
                work = start_all_reduce_(grad_x, group)
        if needs[1]:
            if by_feature is None:
                by_feature = self.round_columns(rows, gradients, is_sharded=self.is_column)
            inputs = x
            if isinstance(inputs, Tensor):
                full = (inputs if gathered is None else wait(gathered)).flatten(0, -2)
                inputs = self.round_columns(full, E4M3, is_sharded=self.is_row)
            grad_weight = multiply(by_feature, inputs, None, weight.dtype)
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
    ) -> Tensor:
        y, inputs = layer.forward(x, weight, bias, keeps_codes=keeps_codes)
        if inputs is None:
            ctx.save_for_backward(weight, x)
        else:
            ctx.save_for_backward(weight, inputs.codes, inputs.scale)
            ctx.block = inputs.block
        ctx.layer = layer
        return y

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        layer: Fp8Linear = ctx.layer
        weight, x, *scale = ctx.saved_tensors
        if scale:
            x = Rounded(x, scale[0], ctx.block)
        return *layer.backward(grad, x, weight, ctx.needs_input_grad[:3]), None, None
