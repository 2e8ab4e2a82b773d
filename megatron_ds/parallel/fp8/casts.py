"""The casts to fp8 as functions that devices compile, without the collectives between them.

Scales that ranks share are computed by two of them: the largest values of a rank, then, with those
of all ranks, the numbers in fp8. The rows of experts are cast for all experts at once.

Shapes: R rows of tokens in the order of the experts, e experts, p parts of rows that have scales,
F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.parallel.fp8.rounding import (
    Dims,
    cast,
    largest_values,
    round_along,
    scale_of,
)

TILE = 64
"""Rows whose largest values a kernel computes at once."""


def parts_of(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the parts of rows lie.

    Args:
        counts: Rows of each expert, [e], or of each expert from each of m micro-batches, [e, m].
        rows: All rows, R.

    Returns:
        Rows until the end of each part, [p], and of each expert, [e]: of the last one with all
        further rows. The part of each row, [R]; p for those without an expert. The first row of
        each tile of rows of one part; R where there is no tile, of which there are as many as any
        R rows of p parts have.
    """
    flat = counts.flatten().int()
    parts = len(flat)

    def until(end: int) -> Tensor:
        return torch.arange(end, dtype=torch.int32, device=flat.device)

    tiles = (flat + TILE - 1) // TILE
    # Not by `cumsum`, of which a device launches two for the two sums.
    is_until = until(parts) <= until(parts)[:, None]
    ends, tile_ends = (
        torch.where(is_until, sizes, 0).sum(1, dtype=torch.int32) for sizes in (flat, tiles)
    )
    of_rows = torch.searchsorted(ends, until(rows), right=True, out_int32=True)
    tile = until(rows // TILE + parts)
    part = torch.searchsorted(tile_ends, tile, right=True, out_int32=True)
    at = part.clamp(max=parts - 1)
    first = (ends - flat)[at] + (tile - (tile_ends - tiles)[at]) * TILE
    first = torch.where(part < parts, first, rows).int()

    def with_further_rows(ends: Tensor) -> Tensor:
        return torch.where(until(len(ends)) == len(ends) - 1, rows, ends).int()

    of_experts = with_further_rows(ends.view(counts.shape[0], -1)[:, -1])
    return with_further_rows(ends), of_experts, of_rows, first


def largest_of_parts(
    x: Tensor, of_rows: Tensor, first: Tensor, parts: int, by_row: bool
) -> tuple[Tensor, ...]:
    """The largest absolute values of this rank of each part of rows, in fp32.

    Those of tiles first, then of the tiles of each part: a maximum of all rows of a part would be a
    kernel of few programs, or one whose programs update one result.

    Args:
        x: The rows, [R, F].
        of_rows: The part of each row; see `parts_of`.
        first: The first row of each tile.
        parts: Number of parts, p.
        by_row: Those of each feature, not one of all.

    Returns:
        With `by_row`, those of each part, [p, F], and of each row, [R, 1]; else those of each part,
        [p, 1].
    """
    largest = _largest_of_tiles(x, of_rows, first, parts, by_row, 1)
    return (largest, *largest_values(x, (-1,), True)) if by_row else (largest,)


def _largest_of_tiles(
    x: Tensor, of_rows: Tensor, first: Tensor, parts: int, by_row: bool, width: int
) -> Tensor:
    """Those of each part; without `by_row` `width` times the same, [p, width]."""
    rows = len(x)
    if not rows:
        return x.new_zeros((parts, x.shape[1] if by_row else width), dtype=torch.float32)
    part = torch.where(first < rows, of_rows[first.clamp(max=rows - 1)], parts)
    index = first[:, None] + torch.arange(TILE, dtype=torch.int32, device=x.device)
    row = index.clamp(max=rows - 1)
    is_inside = (index < rows) & (of_rows[row] == part[:, None])
    values = x[row].abs().masked_fill(~is_inside[..., None], 0.0)
    tiles = values.amax(1) if by_row else values.amax((1, 2))[:, None].expand(-1, width)
    numbers = torch.arange(parts, dtype=torch.int32, device=x.device)
    of_part = part == numbers[:, None]
    return torch.where(of_part[..., None], tiles.float(), 0.0).amax(1)


def cast_parts(
    x: Tensor,
    largest: Tensor,
    of_rows: Tensor,
    dtype: torch.dtype,
    with_columns: bool,
    by_token: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Round rows for the largest absolute values of all ranks.

    Args:
        x: The rows, [R, F].
        largest: Those of each part, [p, F] or [p, 1].
        of_rows: The part of each row; see `parts_of`.
        dtype: `E4M3` or `E5M2`.
        with_columns: Whether to round for sums over the rows, too.
        by_token: Those of each row, [R, 1], if rows have scales of their own.

    Returns:
        Codes [R, F] and the scale of each row, [R, 1]. With `with_columns`, also codes [F, R] and
        the scale of each part's features, [p, F]. Rows without an expert are zeros where they have
        no scales of their own.
    """
    scale = scale_of(largest, dtype).expand(-1, x.shape[1])
    is_left_out = of_rows[:, None] == len(scale)
    scales = scale[of_rows.clamp(max=len(scale) - 1)]
    codes = (x.float() / scales).masked_fill(is_left_out, 0.0).to(dtype)
    # The largest of equal ones: a kernel computes them together with the codes.
    one = (codes, scales.amax(1, keepdim=True))
    if by_token is not None:
        row_scale = scale_of(by_token, dtype)
        one = (x.float() / row_scale).to(dtype), row_scale
    return (*one, codes.t().contiguous(), scale.contiguous()) if with_columns else one


def round_parts(
    x: Tensor, of_rows: Tensor, first: Tensor, parts: int, dtype: torch.dtype, by_row: bool,
    with_columns: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Round rows whose scales one rank has: the results of `cast_parts`."""
    if by_row and not with_columns:
        return round_along(x, (-1,), dtype, True, None)
    by_token = largest_values(x, (-1,), True)[0] if by_row else None
    largest = _largest_of_tiles(x, of_rows, first, parts, by_row, x.shape[1])
    return cast_parts(x, largest, of_rows, dtype, with_columns, by_token)


@dataclass(frozen=True)
class Casts:
    """The functions that cast a matrix; see those of the same names."""

    round_along: Callable[..., tuple[Tensor, ...]] = round_along
    largest_values: Callable[[Tensor, Dims, bool], tuple[Tensor, ...]] = largest_values
    cast: Callable[..., tuple[Tensor, ...]] = cast


@dataclass(frozen=True)
class PartCasts:
    """The functions that cast the rows of experts; see those of the same names."""

    parts_of: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor, Tensor]] = parts_of
    round_parts: Callable[..., tuple[Tensor, ...]] = round_parts
    largest_of_parts: Callable[..., tuple[Tensor, ...]] = largest_of_parts
    cast_parts: Callable[..., tuple[Tensor, ...]] = cast_parts


EAGER = Casts()
EAGER_PARTS = PartCasts()
