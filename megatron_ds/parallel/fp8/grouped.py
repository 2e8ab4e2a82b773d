"""The products of stacked experts in fp8, in the forward and the backward pass.

Each row of tokens, each row of an expert's weight and, for the gradient of the weight, each feature
of an expert's tokens has a scale of its own, as the kernel of torch for grouped products takes
them. Ranks share scales as in `linear`.

Shapes: R rows of tokens in the order of the experts, e experts, I input and O output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    scale_of,
)
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.row_groups import group_of_rows, group_sizes


class Fp8Experts:
    """x W^T + b of each expert's rows: [R, I] to [R, O].

    Args:
        recipe: How it is rounded, with scales of rows.
        group: Group over which the experts' features are sharded.
        sharded: Dimension of the weights [e, O, I] that is: 1, or 2 whose outputs are summed.
    """

    def __init__(self, recipe: Fp8Recipe, group: Group, sharded: int) -> None:
        assert recipe.by_row
        self.recipe = recipe
        self.group = group
        self.sharded = sharded

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # kept weights change in no graph
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        """The outputs of rows that end at `ends`, complete on each rank."""
        y: Tensor = _Fp8Groups.apply(x, weight, bias, ends, self)
        return y

    def round_weight(self, weight: Tensor, dim: int) -> Rounded:
        """W [e, O, I] rounded along its dimension `dim`, the last one of the result."""

        def compute() -> Rounded:
            groups = (self.group,) if dim == self.sharded else ()
            rows = weight if dim == 2 else weight.mT
            amax = largest_of_ranks(rows.abs().amax(2, keepdim=True).float(), groups)
            scale = scale_of(amax, E4M3)
            return Rounded((rows.float() / scale).to(E4M3).contiguous(), scale)

        return self.recipe.weights.take(self, dim, compute)

    def round_rows(self, rows: Tensor, dtype: torch.dtype, *, is_sharded: bool) -> Rounded:
        """Activations or gradients with a scale for each row."""
        groups = (self.group,) if is_sharded else ()
        return round_matrix(rows, 1, dtype, by_row=True, groups=groups)

    def round_columns(self, rows: Tensor, dtype: torch.dtype, ends: Tensor) -> Rounded:
        """The same with a scale for each expert's features, [e, features]."""
        expert = group_of_rows(ends, len(rows))
        amax = rows.new_zeros((len(ends), rows.shape[1]), dtype=torch.float32)
        index = expert[:, None].expand_as(rows)
        amax.scatter_reduce_(0, index, rows.abs().float(), "amax")
        scale = scale_of(largest_of_ranks(amax, (self.recipe.tokens,)), dtype)
        return Rounded((rows.float() / scale[expert]).to(dtype), scale)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        """The forward pass."""
        rows = self.round_rows(x, E4M3, is_sharded=self.sharded == 2)
        y = multiply_groups(rows, self.round_weight(weight, 2), ends, x.dtype)
        if self.sharded == 2 and self.group.size > 1:
            y = reduce_from_group_(y, self.group)
        return y if bias is None else y + bias[group_of_rows(ends, len(y))]

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor, *, has_bias: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of x, W and b."""
        gradients = self.recipe.gradients
        rows = self.round_rows(grad, gradients, is_sharded=self.sharded == 1)
        grad_x = multiply_groups(rows, self.round_weight(weight, 1), ends, grad.dtype)
        by_feature = self.round_columns(grad, gradients, ends)
        inputs = self.round_columns(x, E4M3, ends)
        grad_weight = multiply_columns(by_feature, inputs, ends, weight.dtype)
        grad_bias = None
        if has_bias:
            groups = grad.split(group_sizes(ends))
            grad_bias = torch.stack([group.sum(0) for group in groups])
        return grad_x, grad_weight, grad_bias


def multiply_groups(a: Rounded, b: Rounded, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Each expert's rows of a times its matrix of b transposed: [R, O] of [R, I] and [e, O, I].

    On a CPU sums of products of the codes in fp32, which are multiplied by the scale of the row,
    then by that of the matrix's row, and rounded once.
    """
    if dtype is torch.bfloat16 and len(a.codes) and has_grouped_kernel(a.codes.device):
        return _multiply_groups_by_kernel(a, b, ends)
    sizes = group_sizes(ends)
    parts = zip(a.codes.split(sizes), a.scale.split(sizes), b.codes, b.scale, strict=True)
    products = [
        rows.float() @ matrix.float().t() * scale * matrix_scale.t()
        for rows, scale, matrix, matrix_scale in parts
    ]
    return torch.cat(products).to(dtype)


def multiply_columns(a: Rounded, b: Rounded, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Each expert's columns of a times those of b: [e, O, I] of [R, O] and [R, I].

    As `multiply_groups`; an expert without rows has zeros.
    """
    if dtype is torch.bfloat16 and len(a.codes) and has_grouped_kernel(a.codes.device):
        return _multiply_columns_by_kernel(a, b, ends)
    sizes = group_sizes(ends)
    parts = zip(a.codes.split(sizes), b.codes.split(sizes), a.scale, b.scale, strict=True)
    products = [
        one.float().t() @ other.float() * scale[:, None] * other_scale
        for one, other, scale, other_scale in parts
    ]
    return torch.stack(products).to(dtype)


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
    ends = torch.tensor([16, 64], dtype=torch.int32)
    alone = Group((0,), 0, None)
    layer = Fp8Experts(Fp8Recipe(E5M2, True, alone), alone, 1)
    pairs: list[tuple[GroupedProduct, GroupedProduct, Rounded, Rounded]] = [
        (
            multiply_groups,
            _multiply_groups_by_kernel,
            layer.round_rows(x, E4M3, is_sharded=False),
            layer.round_weight(weight, 2),
        ),
        (
            multiply_columns,
            _multiply_columns_by_kernel,
            layer.round_columns(gradient, E5M2, ends),
            layer.round_columns(x, E4M3, ends),
        ),
    ]
    try:
        for product, by_kernel, a, b in pairs:
            expected = product(a, b, ends, torch.bfloat16).float()
            moved = [Rounded(m.codes.to(device), m.scale.to(device)) for m in (a, b)]
            y = by_kernel(*moved, ends.to(device)).float().cpu()
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
        ends: Tensor,
        layer: Fp8Experts,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.layer = layer
        ctx.has_bias = bias is not None
        return layer.forward(x, weight, bias, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer: Fp8Experts = ctx.layer
        x, weight, ends = ctx.saved_tensors
        gradients = layer.backward(grad, x, weight, ends, has_bias=ctx.has_bias)
        return *gradients, None, None
