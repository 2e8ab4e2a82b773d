"""The products of stacked experts in fp8, in the forward and the backward pass.

Each expert is a linear layer of `linear` that multiplies its rows of one micro-batch after the
other. With one scale for a tensor, the rows of an expert from a micro-batch have one, and the
weight of each expert. With scales of rows, each row of tokens, each row of an expert's weight and,
for the gradient of the weight, each feature of an expert's rows from a micro-batch has one. The
kernel of torch for grouped products takes scales of rows, which may be equal. Ranks share scales as
in `linear`.

Expert-parallel ranks send an expert the rows of several micro-batches at once. The gradient of its
weight is then the sum of a product for each of them.

Shapes: R rows of tokens in the order of the experts, e experts, m micro-batches, p = e x m parts of
rows, I input and O output features.
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
    KERNEL_ERROR,
    Dims,
    Rounded,
    is_shared,
    largest_of_ranks,
    paired,
)
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.row_groups import group_of_rows, group_sizes


@dataclass(frozen=True)
class Parts:
    """Rows of each expert from each micro-batch, and last those without an expert.

    What rows without an expert are multiplied by is arbitrary, and their gradients are zero.
    """

    ends: Tensor
    """Rows until the end of each part, [p]; of the last one with all further rows."""
    ends_of_experts: Tensor
    """Rows until the end of each expert, [e]; of the last one with all further rows."""
    of_rows: Tensor
    """The part of each row, [R]; p for those without an expert."""
    first: Tensor
    """The first row of each tile of rows, for `largest_of_parts`."""

    @classmethod
    def of(cls, recipe: Fp8Recipe, counts: Tensor, rows: int) -> Parts:
        """The parts of the rows of a rank.

        Args:
            recipe: How they are rounded.
            counts: Rows of each expert from each micro-batch, [e, m], in this order, or [e] for
                one.
            rows: All rows, R.
        """
        return cls(*recipe.part_casts.parts_of(counts, rows))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.ends, self.ends_of_experts, self.of_rows, self.first


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
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts) -> Tensor:
        """The outputs of rows, complete on each rank."""
        keeps_codes = torch.is_grad_enabled() and weight.requires_grad
        y: Tensor = _Fp8Groups.apply(x, weight, bias, self, keeps_codes, *parts.tensors)
        return y

    def round_weight(self, weight: Tensor, dim: int) -> Rounded:
        """W [e, O, I] rounded along its dimension `dim`, the last one of the result."""
        weights = self.recipe.weights
        if not weights.is_keeping:
            return self._round_weight(weight, (dim,))[0]
        both = weights.take(self, lambda: self._round_weight(weight, (2, 1)))
        return both[2 - dim]

    def _round_weight(self, weight: Tensor, dims: Dims) -> list[Rounded]:
        recipe = self.recipe
        groups = tuple(
            (self.group,) if not recipe.by_row or dim == self.sharded else () for dim in dims
        )
        return recipe.round_weight(weight, tuple(dim - 3 for dim in dims), None, groups)

    def round_rows(
        self,
        rows: Tensor,
        dtype: torch.dtype,
        parts: Parts,
        *,
        is_sharded: bool,
        with_columns: bool = True,
    ) -> list[Rounded]:
        """Activations or gradients with a scale for each row, then for each part's features.

        Args:
            rows: The numbers, [R, F].
            dtype: Format.
            parts: Which rows share a scale.
            is_sharded: Whether the features are sharded over the group.
            with_columns: Whether to round for sums over the rows, too.

        Returns:
            [R, F], and with `with_columns` transposed, [F, R], with scales [p, F].
        """
        recipe = self.recipe
        casts = recipe.part_casts
        by_row = recipe.by_row
        groups = (self.group,) if is_sharded else ()
        count = len(parts.ends)
        of_parts = (recipe.tokens,) if by_row else (*groups, recipe.tokens)
        if not is_shared((*groups, *of_parts)):
            options = dtype, by_row, with_columns
            return paired(
                casts.round_parts(rows, parts.of_rows, parts.first, count, *options), None
            )
        if by_row and not with_columns:
            return recipe.round(rows, (-1,), dtype, None, (groups,))
        largest, *by_token = casts.largest_of_parts(rows, parts.of_rows, parts.first, count, by_row)
        largest_of_ranks(largest, of_parts)
        for amax in by_token:
            largest_of_ranks(amax, groups)
        return paired(
            casts.cast_parts(rows, largest, parts.of_rows, dtype, with_columns, *by_token), None
        )

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, parts: Parts, *, keeps_codes: bool
    ) -> tuple[Tensor, Rounded | None]:
        """The forward pass: the output, and x rounded for the gradient of W if it is kept."""
        rows, *inputs = self.round_rows(
            x, E4M3, parts, is_sharded=self.sharded == 2, with_columns=keeps_codes
        )
        ends = parts.ends_of_experts
        y = multiply_groups(rows, self.round_weight(weight, 2), ends, x.dtype)
        if self.sharded == 2 and self.group.size > 1:
            y = reduce_from_group_(y, self.group)
        y = y if bias is None else y + bias[group_of_rows(ends, len(y))]
        return y, inputs[0] if inputs else None

    def backward(
        self, grad: Tensor, inputs: Rounded | None, weight: Tensor, parts: Parts, *, has_bias: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The gradients of x, W and b, for what `forward` kept of x."""
        ends = parts.ends_of_experts
        rows, *by_feature = self.round_rows(
            grad,
            self.recipe.gradients,
            parts,
            is_sharded=self.sharded == 1,
            with_columns=inputs is not None,
        )
        grad_x = multiply_groups(rows, self.round_weight(weight, 1), ends, grad.dtype)
        grad_weight = None
        if inputs is not None:
            grad_weight = multiply_columns(by_feature[0], inputs, parts, weight.dtype)
        grad_bias = None
        if has_bias:
            grad_bias = torch.stack([group.sum(0) for group in grad.split(group_sizes(ends))])
        return grad_x, grad_weight, grad_bias


def multiply_groups(a: Rounded, b: Rounded, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Each expert's rows of a times its matrix of b transposed: [R, O] of [R, I] and [e, O, I].

    On a CPU sums of products of the codes in fp32, which are multiplied by the scale of the row,
    then by that of the matrix's row, and rounded once.
    """
    if (
        dtype is torch.bfloat16
        and len(a.codes)
        and has_grouped_kernel(a.codes.device, a.codes.dtype)
    ):
        return _multiply_groups_by_kernel(a, b, ends)
    sizes = group_sizes(ends)
    pairs = zip(a.codes.split(sizes), a.scale.split(sizes), b.codes, b.scale, strict=True)
    products = [
        rows.float() @ matrix.float().t() * scale * matrix_scale.t()
        for rows, scale, matrix, matrix_scale in pairs
    ]
    return torch.cat(products).to(dtype)


def multiply_columns(a: Rounded, b: Rounded, parts: Parts, dtype: torch.dtype) -> Tensor:
    """Each expert's columns of a times those of b: [e, O, I] of [O, R] and [I, R].

    As `multiply_groups`, with the sum over the micro-batches of what is not rounded yet; an expert
    without rows has zeros.
    """
    experts = len(parts.ends_of_experts)
    rows = a.codes.shape[1]
    if dtype is torch.bfloat16 and rows and has_grouped_kernel(a.codes.device, a.codes.dtype):
        products = _multiply_columns_by_kernel(a, b, parts.ends)
        by_expert = products.unflatten(0, (experts, -1))
        return products if len(products) == experts else by_expert.sum(1)
    sizes = group_sizes(parts.ends)
    codes = a.codes.split(sizes, 1), b.codes.split(sizes, 1)
    sums = torch.zeros((experts, len(a.codes), len(b.codes)), device=a.codes.device)
    for part, (one, other, scale, other_scale) in enumerate(
        zip(*codes, a.scale, b.scale, strict=True)
    ):
        product = one.float() @ other.float().t() * scale[:, None] * other_scale
        sums[part // (len(sizes) // experts)] += product
    return sums.to(dtype)


def _multiply_groups_by_kernel(a: Rounded, b: Rounded, ends: Tensor) -> Tensor:
    scales = a.scale[:, 0].contiguous(), b.scale[..., 0].contiguous()
    options: Any = {"offs": ends, "out_dtype": torch.bfloat16}
    return torch._scaled_grouped_mm(a.codes, b.codes.mT, *scales, **options)


def _multiply_columns_by_kernel(a: Rounded, b: Rounded, ends: Tensor) -> Tensor:
    scales = a.scale.flatten(), b.scale.flatten()
    options: Any = {"offs": ends, "out_dtype": torch.bfloat16}
    return torch._scaled_grouped_mm(a.codes, b.codes.t(), *scales, **options)


@functools.cache
def has_grouped_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device, other than a CPU, multiplies groups as is defined.

    Args:
        device: The device.
        dtype: Format of the rows or columns, which are multiplied by numbers in E4M3. The kernel
            of torch 2.13 takes no other one.
    """
    if is_host(device.type):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator)
    weight = torch.randn(2, 48, 32, generator=generator)
    gradient = torch.randn(64, 48, generator=generator)
    alone = Group((0,), 0, None)
    recipe = Fp8Recipe(dtype, True, alone)
    parts = Parts.of(recipe, torch.tensor([16, 48]), len(x))
    layer = Fp8Experts(recipe, alone, 1)
    of_x = layer.round_rows(x, dtype, parts, is_sharded=False)
    of_gradient = layer.round_rows(gradient, dtype, parts, is_sharded=False)
    inputs = layer.round_rows(x, E4M3, parts, is_sharded=False)
    products: list[tuple[GroupedProduct, GroupedProduct, Rounded, Rounded]] = [
        (
            functools.partial(multiply_groups, ends=parts.ends),
            _multiply_groups_by_kernel,
            of_x[0],
            layer.round_weight(weight, 2),
        ),
        (
            functools.partial(multiply_columns, parts=parts),
            _multiply_columns_by_kernel,
            of_gradient[1],
            inputs[1],
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
        layer: Fp8Experts,
        keeps_codes: bool,
        *parts: Tensor,
    ) -> Tensor:
        """The last arguments are the tensors of `Parts`."""
        y, inputs = layer.forward(x, weight, bias, Parts(*parts), keeps_codes=keeps_codes)
        kept = () if inputs is None else (inputs.codes, inputs.scale)
        ctx.save_for_backward(weight, *parts, *kept)
        ctx.layer = layer
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Fp8Experts = ctx.layer
        weight, *saved = ctx.saved_tensors
        inputs = Rounded(*saved[4:]) if saved[4:] else None
        parts = Parts(*saved[:4])
        gradients = layer.backward(grad, inputs, weight, parts, has_bias=ctx.has_bias)
        return *gradients, None, None, *([None] * 4)
