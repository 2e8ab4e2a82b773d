"""The products of stacked experts in fp8, in the forward and the backward pass.

Each expert is a linear layer of `linear` that multiplies its rows of one micro-batch after the
other. With one scale for a tensor, the rows of an expert from a micro-batch have one, and the
weight of each expert. With scales of rows, each row of tokens, each row of an expert's weight and,
for the gradient of the weight, each feature of an expert's rows from a micro-batch has one. The
kernel of torch for grouped products takes scales of rows, which may be equal. Ranks share scales as
in `linear`.

Expert-parallel ranks send an expert the rows of several micro-batches at once. The gradient of its
weight is then the sum of a product for each of them.

Shapes: R rows of tokens in the order of the experts, e experts, m micro-batches, I input and O
output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler at once

from megatron_ds.config.devices import is_host
from megatron_ds.parallel.collectives import reduce_from_group_
from megatron_ds.parallel.fp8.linear import Fp8Recipe
from megatron_ds.parallel.fp8.rounding import (
    E4M3,
    E5M2,
    KERNEL_ERROR,
    Rounded,
    largest_of_ranks,
    round_matrix,
    round_stack,
    scale_of,
    transposed_stack,
)
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.row_groups import group_of_rows, group_sizes


@dataclass(frozen=True)
class Parts:
    """The rows of each expert from each micro-batch, and last those without an expert.

    What rows without an expert are multiplied by is arbitrary, and their gradients are zero.
    """

    counts: Tensor
    """Rows of each expert from each micro-batch, [e, m], in this order, or [e] for one."""
    rows: int
    """All rows, R."""

    @property
    def of_rows(self) -> Tensor:
        """The part of each row, [R]; e x m for those without an expert."""
        ends = self.counts.flatten().cumsum(0, dtype=torch.int32)
        return group_of_rows(ends, self.rows)

    @property
    def ends(self) -> Tensor:
        """Rows until the end of each part, [e x m]; of the last one with all further rows."""
        return self._closed(self.counts.flatten())

    @property
    def ends_of_experts(self) -> Tensor:
        """Rows until the end of each expert, [e]; of the last one with all further rows."""
        return self._closed(self.counts if self.counts.dim() == 1 else self.counts.sum(1))

    def _closed(self, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        ends[-1:].fill_(self.rows)
        return ends


class Fp8Experts:
    """x W^T + b of each expert's rows: [R, I] to [R, O].

    Args:
        recipe: How it is rounded, with one scale or with scales of rows.
        group: Group over which the experts' features are sharded.
        sharded: Dimension of the weights [e, O, I] that is: 1, or 2 whose outputs are summed.
    """

    def __init__(self, recipe: Fp8Recipe, group: Group, sharded: int) -> None:
        assert recipe.block is None
        self.recipe = recipe
        self.group = group
        self.sharded = sharded

    @_disable_dynamo  # kept weights change in no graph
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
        """The outputs of rows, complete on each rank; `counts` is that of `Parts`."""
        y: Tensor = _Fp8Groups.apply(x, weight, bias, counts, self)
        return y

    def round_weight(self, weight: Tensor, dim: int) -> Rounded:
        """W [e, O, I] rounded along its dimension `dim`, the last one of the result."""
        recipe = self.recipe

        if recipe.weights.is_keeping and self.group.size == 1:
            by_input, by_output = recipe.weights.take(self, None, lambda: self._round_both(weight))
            return by_input if dim == 2 else by_output

        def compute() -> Rounded:
            if dim == 1 and not recipe.by_row:
                rounded = self.round_weight(weight, 2)
                return Rounded(*transposed_stack(rounded.codes, rounded.scale))
            is_shared = not recipe.by_row or dim == self.sharded
            groups = (self.group,) if is_shared else ()
            return Rounded(*round_stack(weight, dim, by_row=recipe.by_row, groups=groups))

        return recipe.weights.take(self, dim, compute)

    def _round_both(self, weight: Tensor) -> tuple[Rounded, Rounded]:
        recipe = self.recipe
        codes, scale, columns, column_scale = recipe.round_stack(weight.detach(), recipe.by_row)
        return Rounded(codes, scale), Rounded(columns, column_scale)

    def round_rows(
        self, rows: Tensor, dtype: torch.dtype, parts: Parts, *, is_sharded: bool
    ) -> Rounded:
        """Activations or gradients with a scale for each row.

        Args:
            rows: The numbers.
            dtype: Format.
            parts: Which rows share a scale, if there is one for a tensor.
            is_sharded: Whether the features are sharded over the group.
        """
        if self.recipe.by_row:
            groups = (self.group,) if is_sharded else ()
            return round_matrix(rows, 1, dtype, by_row=True, groups=groups)
        of_rows = parts.of_rows
        scale = self._scales_of_parts(rows, dtype, parts, of_rows, is_sharded=is_sharded)[of_rows]
        return Rounded((rows.float() / scale).to(dtype), scale)

    def round_columns(
        self, rows: Tensor, dtype: torch.dtype, parts: Parts, *, is_sharded: bool
    ) -> Rounded:
        """The same with a scale for each part's features, [e x m, features]."""
        of_rows = parts.of_rows
        scale = self._scales_of_parts(rows, dtype, parts, of_rows, is_sharded=is_sharded)
        codes = (rows.float() / scale[of_rows]).to(dtype)
        return Rounded(codes, scale[:-1].expand(-1, rows.shape[1]))

    def _scales_of_parts(
        self,
        rows: Tensor,
        dtype: torch.dtype,
        parts: Parts,
        of_rows: Tensor,
        *,
        is_sharded: bool,
    ) -> Tensor:
        """Scales of each part, and of the rows without an expert: of its features, or one."""
        recipe = self.recipe
        largest = rows.abs() if recipe.by_row else rows.abs().amax(1, keepdim=True)
        amax = rows.new_zeros((parts.counts.numel() + 1, largest.shape[1]), dtype=torch.float32)
        index = of_rows.long()[:, None].expand_as(largest)
        amax.scatter_reduce_(0, index, largest.float(), "amax")
        groups = [self.group] if is_sharded and not recipe.by_row else []
        return scale_of(largest_of_ranks(amax, (*groups, recipe.tokens)), dtype)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts) -> Tensor:
        """The forward pass."""
        rows = self.round_rows(x, E4M3, parts, is_sharded=self.sharded == 2)
        ends = parts.ends_of_experts
        y = multiply_groups(rows, self.round_weight(weight, 2), ends, x.dtype)
        if self.sharded == 2 and self.group.size > 1:
            y = reduce_from_group_(y, self.group)
        return y if bias is None else y + bias[group_of_rows(ends, len(y))]

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, parts: Parts, *, has_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of x, W and b."""
        gradients = self.recipe.gradients
        ends = parts.ends_of_experts
        of_outputs = {"is_sharded": self.sharded == 1}
        rows = self.round_rows(grad, gradients, parts, **of_outputs)
        grad_x = multiply_groups(rows, self.round_weight(weight, 1), ends, grad.dtype)
        by_feature = self.round_columns(grad, gradients, parts, **of_outputs)
        inputs = self.round_columns(x, E4M3, parts, is_sharded=self.sharded == 2)
        grad_weight = multiply_columns(by_feature, inputs, parts, weight.dtype)
        grad_bias = None
        if has_bias:
            grad_bias = torch.stack([group.sum(0) for group in grad.split(group_sizes(ends))])
        return grad_x, grad_weight, grad_bias


def multiply_groups(a: Rounded, b: Rounded, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Each expert's rows of a times its matrix of b transposed: [R, O] of [R, I] and [e, O, I].

    On a CPU sums of products of the codes in fp32, which are multiplied by the scale of the row,
    then by that of the matrix's row, and rounded once.
    """
    if dtype is torch.bfloat16 and len(a.codes) and has_grouped_kernel(a.codes.device):
        return _multiply_groups_by_kernel(a, b, ends)
    sizes = group_sizes(ends)
    pairs = zip(a.codes.split(sizes), a.scale.split(sizes), b.codes, b.scale, strict=True)
    products = [
        rows.float() @ matrix.float().t() * scale * matrix_scale.t()
        for rows, scale, matrix, matrix_scale in pairs
    ]
    return torch.cat(products).to(dtype)


def multiply_columns(a: Rounded, b: Rounded, parts: Parts, dtype: torch.dtype) -> Tensor:
    """Each expert's columns of a times those of b: [e, O, I] of [R, O] and [R, I].

    As `multiply_groups`, with the sum over the micro-batches of what is not rounded yet; an expert
    without rows has zeros.
    """
    experts = len(parts.counts)
    if dtype is torch.bfloat16 and len(a.codes) and has_grouped_kernel(a.codes.device):
        products = _multiply_columns_by_kernel(a, b, parts.ends)
        by_expert = products.unflatten(0, (experts, -1))
        return products if len(products) == experts else by_expert.sum(1)
    sizes = group_sizes(parts.ends)
    pairs = zip(a.codes.split(sizes), b.codes.split(sizes), a.scale, b.scale, strict=True)
    sums = torch.zeros((experts, a.codes.shape[1], b.codes.shape[1]), device=a.codes.device)
    for part, (one, other, scale, other_scale) in enumerate(pairs):
        product = one.float().t() @ other.float() * scale[:, None] * other_scale
        sums[part // (len(sizes) // experts)] += product
    return sums.to(dtype)


def _multiply_groups_by_kernel(a: Rounded, b: Rounded, ends: Tensor) -> Tensor:
    scales = a.scale[:, 0].contiguous(), b.scale[..., 0].contiguous()
    options: Any = {"offs": ends, "out_dtype": torch.bfloat16}
    return torch._scaled_grouped_mm(a.codes, b.codes.mT, *scales, **options)


def _multiply_columns_by_kernel(a: Rounded, b: Rounded, ends: Tensor) -> Tensor:
    columns = a.codes.t().contiguous(), b.codes.t().contiguous().t()
    scales = a.scale.flatten(), b.scale.flatten()
    options: Any = {"offs": ends, "out_dtype": torch.bfloat16}
    return torch._scaled_grouped_mm(*columns, *scales, **options)


@functools.cache
def has_grouped_kernel(device: torch.device) -> bool:
    """Whether a device, other than a CPU, multiplies groups as is defined."""
    if is_host(device.type):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator)
    weight = torch.randn(2, 48, 32, generator=generator)
    gradient = torch.randn(64, 48, generator=generator)
    parts = Parts(torch.tensor([16, 48]), len(x))
    alone = Group((0,), 0, None)
    layer = Fp8Experts(Fp8Recipe(E5M2, True, alone), alone, 1)
    products: list[tuple[GroupedProduct, GroupedProduct, Rounded, Rounded]] = [
        (
            functools.partial(multiply_groups, ends=parts.ends),
            _multiply_groups_by_kernel,
            layer.round_rows(x, E4M3, parts, is_sharded=False),
            layer.round_weight(weight, 2),
        ),
        (
            functools.partial(multiply_columns, parts=parts),
            _multiply_columns_by_kernel,
            layer.round_columns(gradient, E5M2, parts, is_sharded=False),
            layer.round_columns(x, E4M3, parts, is_sharded=False),
        ),
    ]
    try:
        for product, by_kernel, a, b in products:
            expected = product(a, b, dtype=torch.bfloat16).float()
            moved = [Rounded(m.codes.to(device), m.scale.to(device)) for m in (a, b)]
            y = by_kernel(*moved, parts.ends.to(device)).float().cpu()
            if not (y - expected).abs().max() <= KERNEL_ERROR * expected.abs().max():
                return False
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False
    return True


GroupedProduct = Callable[..., Tensor]


class _Fp8Groups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        counts: Tensor,
        layer: Fp8Experts,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.layer = layer
        ctx.has_bias = bias is not None
        return layer.forward(x, weight, bias, Parts(counts, len(x)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Fp8Experts = ctx.layer
        x, weight, counts = ctx.saved_tensors
        parts = Parts(counts, len(x))
        return *layer.backward(grad, x, weight, parts, has_bias=ctx.has_bias), None, None
