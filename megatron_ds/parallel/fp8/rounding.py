"""Matrices rounded to fp8 with a scale, and products of them.

Owns the definition: which numbers are rounded to what, and how products of them are summed. Devices
with a kernel compute the same products, whose sums they round elsewhere. Formats: E4M3 and E5M2 of
Micikevicius et al. 2022, as torch has them, without infinity in E4M3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config.devices import HOST
from megatron_ds.config.options.precision import FP8_MULTIPLE
from megatron_ds.parallel.mesh import Group

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
Block = tuple[int, int]
"""Rows and columns of a block."""
Dims = tuple[int, ...]
"""Dimensions of a matrix along which products are summed, from the last one, -1."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest scale by which numbers are divided: that of the smallest normal number in fp32."""


@dataclass(frozen=True)
class Rounded:
    """A matrix in fp8: `codes` times `scale`."""

    codes: Tensor
    """[rows, columns] in fp8; products are summed over the columns."""
    scale: Tensor
    """fp32, of the matrix, [], of each row, [rows, 1], or of each block."""
    block: Block | None = None
    """Rows and columns of the blocks that have scales."""

    def transposed(self) -> Rounded:
        """The transposed matrix, of a matrix with one scale or with blocks."""
        codes = self.codes.t().contiguous()
        if self.block is not None:
            return Rounded(codes, self.scale.t().contiguous(), self.block[::-1])
        assert self.scale.dim() == 0
        return Rounded(codes, self.scale)

    def values(self) -> Tensor:
        """The rounded numbers in fp32."""
        if self.block is None:
            return self.codes.float() * self.scale
        rows, columns = self.codes.shape
        scale = self.scale.repeat_interleave(self.block[0], 0)[:rows]
        return self.codes.float() * scale.repeat_interleave(self.block[1], 1)[:, :columns]


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
    dims = (dim - 2,)
    largest = largest_values(x, dims, by_row)
    for amax in largest:
        largest_of_ranks(amax, groups)
    return paired(cast(x, largest, dims, dtype), None)[0]


def round_blocks(x: Tensor, dtype: torch.dtype, block: Block) -> Rounded:
    """Round a matrix with a scale for each block, as DeepSeek-AI 2024 (section 3.3.2).

    A scale is that of `round_matrix`, rounded up to a power of two, so that it adds no rounding
    error: numbers are divided and products multiplied by it exactly. Blocks at the ends may be
    smaller.

    Args:
        x: Matrix [rows, columns], whose products are summed over the columns.
        dtype: `E4M3` or `E5M2`.
        block: Rows and columns of a block.
    """
    rows, columns = x.shape
    padded = F.pad(x, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scale = power_of_two_above(scale_of(blocks.abs().amax((1, 3)).float(), dtype))
    codes = (blocks.float() / scale[:, None, :, None]).to(dtype)
    codes = codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
    return Rounded(codes, scale, block)


def round_along(
    x: Tensor, dims: Dims, dtype: torch.dtype, by_row: bool, block: Block | None
) -> tuple[Tensor, ...]:
    """Round a matrix or stacked matrices along some dimensions, of ranges that one rank has.

    Devices compile it: the casts of all results then read the numbers once.

    Args:
        x: [rows, columns], or without blocks [e, rows, columns].
        dims: Dimensions along which products are summed: -1, the columns, or -2, the rows.
        dtype: `E4M3` or `E5M2`.
        by_row: As for `round_matrix`.
        block: Rows and columns of the blocks that have scales; with one row, blocks lie along the
            dimension. None: no blocks have.

    Returns:
        Codes and scale of `cast` for each dimension.
    """
    if block is None:
        return cast(x, largest_values(x, dims, by_row), dims, dtype)
    results: list[Tensor] = []
    for dim in dims:
        if dim == -1:
            rounded = round_blocks(x, dtype, block)
        elif block[0] == 1:
            rounded = round_blocks(x.t(), dtype, block)
        else:
            rounded = round_blocks(x, dtype, block).transposed()
        results += rounded.codes, rounded.scale
    return tuple(results)


def largest_values(x: Tensor, dims: Dims, by_row: bool) -> tuple[Tensor, ...]:
    """The largest absolute values of the ranges of this rank, in fp32; arguments of `round_along`.

    Returns:
        Those of each dimension, whose size is then 1. Without scales of rows, only those of the
        matrix, [], or of each matrix, [e, 1, 1].
    """
    if by_row:
        return tuple(x.abs().amax(dim, keepdim=True).float() for dim in dims)
    amax = x.abs().amax() if x.dim() == 2 else x.abs().amax((-2, -1), keepdim=True)
    return (amax.float(),)


def cast(
    x: Tensor, largest: tuple[Tensor, ...], dims: Dims, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Round for the largest absolute values of all ranks; arguments of `round_along`.

    Args:
        x: The numbers.
        largest: The results of `largest_values`.
        dims: Dimensions.
        dtype: Format.

    Returns:
        For each dimension codes, with the dimension last, and scales: of the matrix, [], or of each
        row [rows, 1]; of stacked matrices always of each row, [e, rows, 1].
    """
    scales = [scale_of(amax, dtype) for amax in largest]
    codes = [(x.float() / scale).to(dtype) for scale in scales]
    results: list[Tensor] = []
    for index, dim in enumerate(dims):
        one = codes[index % len(codes)]
        scale = scales[index % len(scales)]
        if dim == -2:
            one = one.mT.contiguous()
            scale = scale.mT if scale.dim() else scale
        if x.dim() == 3:
            scale = scale.expand(-1, one.shape[1], 1)
        results += one, scale.contiguous()
    return tuple(results)


def paired(results: Sequence[Tensor], block: Block | None) -> list[Rounded]:
    """The matrices of `round_along` or `cast`."""
    pairs = zip(results[::2], results[1::2], strict=True)
    return [Rounded(codes, scale, block) for codes, scale in pairs]


def power_of_two_above(x: Tensor) -> Tensor:
    """The smallest powers of two that are at least as large as positive normal numbers in fp32.

    Numbers that are not finite stay as they are.
    """
    exponents = (x.view(torch.int32) + 0x007FFFFF) & 0x7F800000
    return torch.where(x.isfinite(), exponents.view(torch.float32), x)


def is_shared(groups: Iterable[Group]) -> bool:
    """Whether other ranks have parts of a range."""
    return any(group.size > 1 for group in groups)


def largest_of_ranks(amax: Tensor, groups: Iterable[Group]) -> Tensor:
    """The largest values of all ranks of the groups, one group after the other, in `amax`."""
    for group in groups:
        if group.size > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group.handle)
    return amax


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales of ranges with these largest absolute values; see `round_matrix`."""
    scale = amax / torch.finfo(dtype).max
    return scale.masked_fill(scale < SMALLEST_SCALE, 1.0)


def multiply(a: Rounded, b: Rounded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a b^T + bias, rounded once: [rows of a, rows of b].

    The products of the codes are summed in fp32, and the sum multiplied by the scale of a, then by
    that of b; with blocks, the products of the rounded numbers are summed. On a CPU that is what is
    computed, elsewhere by a kernel if there is one.

    Args:
        a: Matrix.
        b: Matrix with as many columns.
        bias: A number for each row of b; it is added in fp32.
        dtype: Type of the result.
    """
    if dtype is torch.bfloat16 and _fits(a, b) and _uses_kernel(a.codes.device, _scaling_of(a, b)):
        return multiply_by_kernel(a, b, bias, dtype)
    if a.block is not None:
        y = a.values() @ b.values().t()
    else:
        y = a.codes.float() @ b.codes.float().t() * a.scale * b.scale.t()
    if bias is not None:
        y = y + bias.float()
    return y.to(dtype)


def multiply_by_kernel(a: Rounded, b: Rounded, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `multiply`, by the kernel of torch."""
    if a.block is None:
        return torch._scaled_mm(
            a.codes,
            b.codes.t(),
            scale_a=_column(a.scale),
            scale_b=_column(b.scale).t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=False,
        )
    return F.scaled_mm(
        a.codes,
        b.codes.t(),
        _scales_of_blocks(a),
        _kernel_scaling(a),
        _scales_of_blocks(b),
        _kernel_scaling(b),
        bias=bias,
        output_dtype=dtype,
    )


def _scales_of_blocks(x: Rounded) -> Tensor:
    """Scales as the kernel takes them: of blocks of a row [rows, blocks], one block of all rows
    after the other; of squares [blocks of columns, blocks of rows], the columns first and their
    number padded to a multiple of 4."""
    if x.block == (1, KERNEL_BLOCK):
        return x.scale.t().contiguous().t()
    return F.pad(x.scale, (0, -x.scale.shape[1] % 4)).contiguous().t()


def _column(scale: Tensor) -> Tensor:
    """Scales of rows as a column, whose second stride is 1, which the kernel requires.

    That of a transposed row is another one, also if it is contiguous.
    """
    return scale if scale.dim() == 0 else scale.flatten().unsqueeze(1)


KERNEL_BLOCK = 128
"""Side of the blocks for which there is a kernel."""


def _kernel_scaling(x: Rounded) -> F.ScalingType:
    is_row = x.block == (1, KERNEL_BLOCK)
    return F.ScalingType.BlockWise1x128 if is_row else F.ScalingType.BlockWise128x128


Scaling = tuple[bool, Block | None, Block | None]
"""Whether rows have scales, and the blocks of both matrices of a product."""


def _scaling_of(a: Rounded, b: Rounded) -> Scaling:
    return a.scale.dim() > 0, a.block, b.block


def scalings_of(*, by_row: bool, block: int | None) -> list[Scaling]:
    """The kinds of products of a recipe: y and dx, then dW."""
    if block is None:
        return [(by_row, None, None)]
    return [(True, (1, block), (block, block)), (True, (1, block), (1, block))]


@functools.cache
def has_kernel(device: torch.device, scaling: Scaling) -> bool:
    """Whether a device, other than a CPU, multiplies matrices in both formats as is defined."""
    by_row, *blocks = scaling
    if device.type == HOST or any(block and max(block) != KERNEL_BLOCK for block in blocks):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * KERNEL_BLOCK, 2 * KERNEL_BLOCK, generator=generator) ** 3
    try:
        for dtype in (E4M3, E5M2):
            a, b = (
                round_matrix(x, 1, of, by_row=by_row, groups=())
                if block is None
                else round_blocks(x, of, block)
                for of, block in zip((dtype, E4M3), blocks, strict=True)
            )
            expected = multiply(a, b, None, torch.bfloat16).float()
            a, b = (Rounded(m.codes.to(device), m.scale.to(device), m.block) for m in (a, b))
            y = multiply_by_kernel(a, b, None, torch.bfloat16).float().cpu()
            if not (y - expected).abs().max() <= KERNEL_ERROR * expected.abs().max():
                return False
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False
    return True


def _uses_kernel(device: torch.device, scaling: Scaling) -> bool:
    """`has_kernel`, which no graph contains after `keep_trials_out_of_graphs`."""
    return has_kernel(device, scaling)


def keep_trials_out_of_graphs() -> None:
    """Let graphs contain whether there is a kernel, and not how that is tried.

    Before layers are compiled; as a decorator, it would import the compiler with this module.
    """
    torch.compiler.assume_constant_result(_uses_kernel)


KERNEL_ERROR = 2**-6
"""Accepted error of a kernel's products, relative to the largest: twice the rounding of bf16."""


def _fits(a: Rounded, b: Rounded) -> bool:
    columns = FP8_MULTIPLE if a.block is None else KERNEL_BLOCK
    rows = FP8_MULTIPLE if b.block is None or b.block[0] == 1 else KERNEL_BLOCK
    return a.codes.shape[1] % columns == 0 and b.codes.shape[0] % rows == 0
