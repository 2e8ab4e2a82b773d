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
from megatron_ds.parallel.fp8.rounding import (
    E4M3,
    Block,
    RoundBoth,
    Rounded,
    RoundStack,
    RoundWeight,
    multiply,
    round_blocks,
    round_both,
    round_matrix,
    round_stack_both,
    round_weight,
)
from megatron_ds.parallel.mesh import Group

Kept = TypeVar("Kept")


class RoundedWeights:
    """Keeps the rounded weights of a model's layers during a step, in which none changes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int | None], Any] | None = None
        self.prepared: set[Fp8Linear] = set()
        """Layers that hold rounded weights for their graphs."""

    @property
    def is_keeping(self) -> bool:
        return self._kept is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it, each weight is rounded once along each dimension."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None
            for layer in self.prepared:
                layer.rounded = None
            self.prepared.clear()

    def take(self, owner: object, dim: int | None, compute: Callable[[], Kept]) -> Kept:
        """What `compute` returns for a layer, which is called if the result is not kept.

        Args:
            owner: The layer.
            dim: Dimension along which its weight is rounded. None: along both, as a pair.
            compute: Rounds the weight.
        """
        if self._kept is None:
            return compute()
        key = id(owner), dim
        if key not in self._kept:
            self._kept[key] = compute()
        kept: Kept = self._kept[key]
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

    round_both: RoundBoth = round_both
    """Rounds what is alone on its rank; a compiled function on a device."""
    round_weight: RoundWeight = round_weight
    round_stack: RoundStack = round_stack_both
    """Round the weights of a layer or of experts that are kept for a step, along both dimensions;
    compiled functions on a device, likewise."""


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
        recipe = self.recipe
        shares = recipe.block is None and self.group.size > 1
        if recipe.weights.is_keeping and not shares:
            by_input, by_output = recipe.weights.take(self, None, lambda: self._round_both(weight))
            return by_input if dim == 1 else by_output

        def compute() -> Rounded:
            if dim == 0 and not recipe.by_row:
                return self.round_weight(weight, 1).transposed()
            if recipe.block is not None:
                return round_blocks(weight, E4M3, (recipe.block, recipe.block))
            is_shared = not recipe.by_row or dim == self.sharded
            groups = (self.group,) if is_shared else ()
            return round_matrix(weight, dim, E4M3, by_row=recipe.by_row, groups=groups)

        return recipe.weights.take(self, dim, compute)

    def _round_both(self, weight: Tensor) -> tuple[Rounded, Rounded]:
        recipe = self.recipe
        codes, scale, columns, column_scale = recipe.round_weight(
            weight.detach(), recipe.by_row, recipe.block
        )
        block = self.block_of_weights
        return Rounded(codes, scale, block), Rounded(columns, column_scale, block)

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
        # In a graph it is compiled with the rest.
        compute = round_both if torch.compiler.is_compiling() else recipe.round_both
        codes, scale, columns, column_scale = compute(rows, dtype, recipe.by_row, recipe.block)
        return Rounded(codes, scale, block), Rounded(columns, column_scale, block)

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
            rows, inputs = self.round_pair(flat, E4M3, is_sharded=self.is_row)
        else:
            rows = self.round_rows(flat, E4M3, is_sharded=self.is_row)
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
        by_feature: Rounded | None = None
        if needs[0]:
            if needs[1]:
                pair = self.round_pair(rows, gradients, is_sharded=self.is_column)
                by_token, by_feature = pair
            else:
                by_token = self.round_rows(rows, gradients, is_sharded=self.is_column)
            product = multiply(by_token, weight(), None, grad.dtype)
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
            grad_weight = multiply(by_feature, inputs, None, dtype)
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
