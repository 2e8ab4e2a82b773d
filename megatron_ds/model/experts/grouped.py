"""The experts of a rank: feed-forward layers that multiply their rows by one call.

Shapes: H hidden or latent, E experts, e experts of this rank, R rows of tokens that they receive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import Problem
from megatron_ds.model.declaration.experts import ExpertsSpec
from megatron_ds.model.kernels.elementwise import EAGER, TOLERANCE
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.collectives import copy_to_group, reduce_from_group_
from megatron_ds.parallel.fp8.grouped import Parts
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.row_groups import group_of_rows, group_sizes
from megatron_ds.parallel.sharding import declared_parameter


class Experts(nn.Module):
    """The experts of this rank: feed-forward layers whose weights are stacked along dimension 0.

    Args:
        spec: Their weights.
        prefix: Canonical name of the mixture of experts.
        mesh: Process groups; each expert-parallel rank has consecutive experts.
        init: Draws the initial weights, each expert's by its number.
    """

    training_parts: Callable[[Tensor, int], Parts] | None = None
    """The rows of each expert from each micro-batch as `training_product` takes them, for their
    numbers and that of all rows."""

    def __init__(self, spec: ExpertsSpec, prefix: str, mesh: Mesh, init: Initializer) -> None:
        super().__init__()
        is_whole = mesh.has_whole_experts
        self.group = Group((mesh.rank,), 0, None) if is_whole else mesh.tp
        self.activation = spec.model.activation_arguments
        self.elementwise = EAGER

        def layer(name: str, reduce_over: Group | None = None) -> StackedLinear:
            weights = spec.layer(prefix, f"experts.{name}")
            groups = mesh.tp, init, mesh.ep
            parts = [declared_parameter(weight, *groups, is_whole=is_whole) for weight in weights]
            return StackedLinear(*parts, reduce_over=reduce_over)

        self.fc_in = layer("fc_in")
        self.fc_out = layer("fc_out", reduce_over=self.group)

    def forward(self, x_RH: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for rows that are in the order of the experts.

        Args:
            x_RH: The rows, the same on all tensor-parallel ranks.
            counts: Number of rows of each expert, [e], or of each expert from each of m
                micro-batches, [e, m]. The last expert has all further rows, too.
        """
        parts = None
        if self.training and self.training_parts is not None:
            parts = self.training_parts(counts, len(x_RH))
            ends = parts.ends_of_experts
        else:
            of_experts = counts if counts.dim() == 1 else counts.sum(1)
            ends = of_experts.cumsum(0, dtype=torch.int32)
            ends[-1:].fill_(len(x_RH))  # a number for one element would be copied from the host
        inner = self.fc_in(copy_to_group(x_RH, self.group), ends, parts)
        inner = self.elementwise.activate(inner, *self.activation)
        y_RH: Tensor = self.fc_out(inner, ends, parts)
        return y_RH


TrainingProduct = Callable[[Tensor, Tensor, Tensor | None, Parts], Tensor]
"""The output of stacked layers, with what is reduced, for x, W, b and the rows of each expert from
each micro-batch."""


class StackedLinear(nn.Module):
    """x W^T + b with a weight [e, out, in] and a bias [e, out] for each expert.

    Args:
        weight: Marked as it is sharded.
        bias: Marked as it is sharded.
        reduce_over: Group over which the outputs are all-reduced before the bias is added. They are
            then complete before the router's weights are applied, and so is the gradient of these
            weights.
    """

    training_product: TrainingProduct | None = None
    """Computes the layers in training, in another number format."""
    gradient_memory: Callable[[], Tensor | None] | None = None
    """Gives memory in which the gradient of the weight, in fp32, is computed. None, also if it
    gives None: new memory."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        reduce_over: Group | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.reduce_over = reduce_over
        self.shape = weight.shape
        self.multiply: GroupedMatmul = grouped_matmul

    def forward(self, x: Tensor, ends: Tensor, parts: Parts | None = None) -> Tensor:
        """The outputs of rows that end at `ends`; products in training take `parts`."""
        if self.training and self.training_product is not None and parts is not None:
            return self.training_product(x, self.weight, self.bias, parts)
        y: Tensor = _StackedMatmul.apply(x, self.weight, self.bias, ends, self)
        return y


GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A matmul for each group of rows, which end at `ends`: [R, in] and [e, in, out] to [R, out], or
[out, R] and [R, in] to [e, out, in]."""


def loop_over_matmuls(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the groups in a loop. The host waits for the group sizes."""
    counts = group_sizes(ends)
    if b.ndim == 3:
        return torch.cat([rows @ matrix for rows, matrix in zip(a.split(counts), b, strict=True)])
    pairs = zip(a.split(counts, dim=1), b.split(counts), strict=True)
    return torch.stack([columns @ rows for columns, rows in pairs])


def multiply_columns_into(result: Tensor, a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiplies groups [out, R] and [R, in] into a result [e, out, in], which it returns."""
    counts = group_sizes(ends)
    for product, columns, rows in zip(result, a.split(counts, dim=1), b.split(counts), strict=True):
        torch.mm(columns, rows, out=product)
    return result


def multiply_padded(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiplies the groups in a loop, each with some rows of its neighbours.

    On CPUs, torch makes a kernel for each shape of a product in bf16 or fp16, which takes longer
    than the product of some hundred rows. Groups of similar sizes share a kernel here.
    """
    rows = a.shape[0] if b.ndim == 3 else a.shape[1]
    sizes = group_sizes(ends)
    starts = [end - size for end, size in zip(ends.tolist(), sizes, strict=True)]
    if b.ndim == 3:
        result = a.new_empty(rows, b.shape[2])
        for start, size, matrix in zip(starts, sizes, b, strict=True):
            end = start + _padded(size)
            if end <= rows:  # further rows are those of the next groups, which come later
                torch.mm(a[start:end], matrix, out=result[start:end])
            else:
                first = max(0, rows - _padded(size))
                result[start : start + size] = (a[first:] @ matrix)[start - first :][:size]
        return result
    result = a.new_zeros(len(sizes), a.shape[0], b.shape[1])
    for start, size, product in zip(starts, sizes, result, strict=True):
        if size:
            first = max(0, min(start, rows - _padded(size)))
            window = b[first : first + _padded(size)]
            padded = a.new_zeros(len(window), a.shape[0])
            padded[start - first :][:size] = a.t()[start : start + size]
            torch.mm(padded.t(), window, out=product)
    return result


def _padded(size: int) -> int:
    """A number of rows that is at least `size` and one of 16 between two powers of two."""
    step = max(16, 1 << max(0, size.bit_length() - 5))
    return -(-size // step) * step


def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Multiplies all groups in one kernel; loops if there are no rows, before torch 2.10, which
    lacks it, and where kernels are made for each shape."""
    if is_host(a.device.type) and a.dtype.itemsize == 2:
        return multiply_padded(a, b, ends)
    if 0 in a.shape or not hasattr(F, "grouped_mm"):
        return loop_over_matmuls(a, b, ends)
    return F.grouped_mm(a, b, offs=ends)


class _StackedMatmul(torch.autograd.Function):
    """x W^T + b of each expert's rows, which end at `ends`.

    The backward pass reads the parameter itself. Saved views of it would keep what ZeRO 3 has
    gathered for the forward pass, or name a buffer into which other weights are swapped. An expert
    without rows has a gradient of zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ends: Tensor,
        layer: StackedLinear,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.multiply = layer.multiply
        ctx.gradient_memory = layer.gradient_memory
        ctx.has_bias = bias is not None
        y = layer.multiply(x, weight.mT, ends)
        if layer.reduce_over is not None:
            y = reduce_from_group_(y, layer.reduce_over)
        if bias is not None:
            y += bias.index_select(0, group_of_rows(ends, len(y)))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        dx = ctx.multiply(gradient, weight, ends)
        memory = None if ctx.gradient_memory is None else ctx.gradient_memory()
        if memory is None:
            dw = ctx.multiply(gradient.t(), x, ends)
        else:
            dw = multiply_columns_into(memory, gradient.t(), x, ends)
        db = _sum_groups(gradient, ends, ctx.multiply) if ctx.has_bias else None
        return dx, dw, db, None, None


def _sum_groups(rows: Tensor, ends: Tensor, multiply: GroupedMatmul) -> Tensor:
    """The sum of each group's rows, in a fixed order: [R, out] to [e, out]."""
    if is_host(rows.device.type):
        return torch.stack([group.sum(0) for group in rows.split(group_sizes(ends))])
    # Kernels of products need rows of 16 bytes.
    return multiply(rows.t(), rows.new_ones(len(rows), 8), ends)[..., 0]


def try_grouped_matmuls(
    model: nn.Module, dtype: torch.dtype, device: torch.device
) -> Problem | None:
    """Let experts multiply one after the other on an accelerator without a kernel for all of them.

    It is tried, forward and backward, on the shapes of the experts, where one has no rows.

    Returns:
        Why the kernel is not used, if there are experts that would use it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, StackedLinear)]
    if is_host(device.type) or not layers:
        return None
    try:
        errors = [_matmul_error(shape, dtype, device) for shape in {x.shape for x in layers}]
        if all(error <= TOLERANCE for error in errors):  # not if one is nan
            return None
        reason = f"its relative error is {max(errors):.2g}"
    except Exception as refusal:  # devices raise any type
        reason = str(refusal).strip().partition("\n")[0] or type(refusal).__name__
    for layer in layers:
        layer.multiply = loop_over_matmuls
    return Problem("experts-one-after-another", reason=reason)


def _matmul_error(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> float:
    """The largest error of outputs and gradients, relative to the norm."""
    ends = torch.arange(1, shape[0] + 1, dtype=torch.int32, device=device) * 33
    ends[:2] = ends[:2].max()
    generator = torch.Generator(device).manual_seed(0)
    rows = 33 * shape[0]
    x, weight, bias, gradient = (
        torch.randn(size, generator=generator, device=device, dtype=dtype).requires_grad_()
        for size in ((rows, shape[2]), shape, shape[:2], (rows, shape[1]))
    )
    layer = StackedLinear(nn.Parameter(weight), nn.Parameter(bias))
    results = []
    for layer.multiply in (grouped_matmul, loop_over_matmuls):
        y = layer(x, ends)
        results.append([y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), gradient)])
    pairs = zip(*results, strict=True)
    return float(torch.stack([(one - other).norm() / other.norm() for one, other in pairs]).max())
