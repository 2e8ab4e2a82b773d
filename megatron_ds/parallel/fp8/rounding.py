"""Matrices rounded to fp8 with a scale, and products of them.

Owns the definition: which numbers are rounded to what, and how products of them are summed. Devices
with a kernel compute the same products, whose sums they round elsewhere. Formats: E4M3 and E5M2 of
Micikevicius et al. 2022, as torch has them, without infinity in E4M3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config.devices import HOST
from megatron_ds.parallel.mesh import Group

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale by which numbers are divided: that of the smallest normal number in fp32."""
MULTIPLE = 16
"""Kernels take matrices whose sizes are multiples of it."""


@dataclass(frozen=True)
class Rounded:
    """A matrix in fp8: `codes` times `scale`."""

    codes: Tensor
    """[rows, columns] in fp8; products are summed over the columns."""
    scale: Tensor
    """fp32, of the matrix, [], or of each row, [rows, 1]."""

    def transposed(self) -> Rounded:
        """The transposed matrix, of a matrix with one scale."""
        assert self.scale.dim() == 0
        return Rounded(self.codes.t().contiguous(), self.scale)

    def values(self) -> Tensor:
        """The rounded numbers in fp32."""
        return self.codes.float() * self.scale


def round_matrix(
    x: Tensor, dim: int, dtype: torch.dtype, *, by_row: bool, groups: Iterable[Group]
) -> Rounded:
    """Round a matrix for a product that is summed along one of its dimensions.

    A scale is the largest absolute value in its range, divided by the largest number of the format;
    1 where the quotient is below `SMALLEST_SCALE`, as for zeros. Numbers are divided by it in fp32
    and rounded to the nearest number of the format, ties to even. Numbers that are not finite make
    all numbers of their range zero or not a number, and the product not a number.

    Args:
        x: Matrix.
        dim: Dimension along which products are summed; the last one of the result.
        dtype: `E4M3` or `E5M2`.
        by_row: One scale for each index of the other dimension, not one for the matrix.
        groups: Groups whose ranks have parts of the ranges.
    """
    largest = x.abs().amax(dim, keepdim=True) if by_row else x.abs().amax()
    amax = largest.float()
    for group in groups:
        if group.size > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group.handle)
    scale = amax / torch.finfo(dtype).max
    scale = torch.where(scale < SMALLEST_SCALE, torch.ones_like(scale), scale)
    codes = (x.float() / scale).to(dtype)
    if dim == 0:
        return Rounded(codes.t().contiguous(), scale.t().contiguous() if by_row else scale)
    return Rounded(codes, scale)


def multiply(a: Rounded, b: Rounded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a b^T + bias, rounded once: [rows of a, rows of b].

    The products of the codes are summed in fp32, and the sum multiplied by the scale of a, then by
    that of b. On a CPU that is what is computed, elsewhere by a kernel if there is one.

    Args:
        a: Matrix.
        b: Matrix with as many columns.
        bias: A number for each row of b; it is added in fp32.
        dtype: Type of the result.
    """
    is_by_row = a.scale.dim() > 0
    if dtype is torch.bfloat16 and _fits(a, b) and has_kernel(a.codes.device, is_by_row):
        return multiply_by_kernel(a, b, bias, dtype)
    y = a.codes.float() @ b.codes.float().t() * a.scale * b.scale.t()
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype)


def multiply_by_kernel(a: Rounded, b: Rounded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `multiply`, by the kernel of torch."""
    return torch._scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=a.scale,
        scale_b=b.scale.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=False,
    )


@functools.cache
def has_kernel(device: torch.device, by_row: bool) -> bool:
    """Whether a device, other than a CPU, multiplies matrices in both formats."""
    if device.type == HOST:
        return False
    zeros = torch.zeros(MULTIPLE, MULTIPLE, device=device)
    try:
        for dtype in (E4M3, E5M2):
            a = round_matrix(zeros, 1, dtype, by_row=by_row, groups=())
            b = round_matrix(zeros, 1, E4M3, by_row=by_row, groups=())
            multiply_by_kernel(a, b, None, torch.bfloat16)
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def _fits(a: Rounded, b: Rounded) -> bool:
    return not any(size % MULTIPLE for size in (a.codes.shape[1], b.codes.shape[0]))
