"""Stochastic rounding to bf16 whose random bits depend on the element of the model alone.

Owns the random bits, the rounding, and which elements of a complete weight a flat tensor of the
optimizer has. A layout changes neither of them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.engine.states.flats import Flat, Part
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import expert_group, shard_spec

LOW_HALF = 0xFFFF
HIGH_HALF = -0x10000
"""Masks of the halves of 32 bits. A float of 32 bits has the bits of a bf16 in its high half."""


@dataclass(frozen=True)
class Block:
    """Elements of a weight in a flat tensor: rows of consecutive elements of the complete weight.

    Attributes:
        name: Canonical name of the weight.
        rows: Number of rows.
        columns: Elements of a row.
        position: The first element, in the flat tensor.
        step: Elements of the flat tensor from one row to the next.
        full_position: The first element, in the complete weight, flattened.
        full_step: Elements of the complete weight from one row to the next.
    """

    name: str
    rows: int
    columns: int
    position: int
    step: int
    full_position: int
    full_step: int

    def view(self, flat: Tensor) -> Tensor:
        """The elements of the flat tensor, [rows, columns]."""
        offset = flat.storage_offset() + self.position
        step = self.columns if self.rows == 1 else self.step
        return flat.as_strided((self.rows, self.columns), (step, 1), offset)

    def split(self, elements: int) -> Iterator[Block]:
        """Parts with at most so many elements, or with a part of one row."""
        rows = max(1, elements // self.columns)
        columns = min(self.columns, elements)
        for row in range(0, self.rows, rows):
            for column in range(0, self.columns, columns):
                yield Block(
                    self.name,
                    min(rows, self.rows - row),
                    min(columns, self.columns - column),
                    self.position + row * self.step + column,
                    self.step,
                    self.full_position + row * self.full_step + column,
                    self.full_step,
                )


def blocks_of(flat: Flat, tp: Group) -> list[Block]:
    """The elements that a flat tensor of this rank has, its padding excluded.

    Args:
        flat: The flat tensor.
        tp: Tensor-parallel group.
    """
    return [block for part in flat.parts for block in _blocks(part, tp)]


def _blocks(part: Part, tp: Group) -> Iterator[Block]:
    assert expert_group(part.parameter) is None, "experts of other ranks have other positions"
    shape = part.place.shape
    spec = shard_spec(part.parameter)
    size = math.prod(shape)
    if spec is None:
        row_size = size
        full_size = size
        sections = [(0, 0, size)]
    else:
        inner = math.prod(shape[spec.dim + 1 :])
        row_size = shape[spec.dim] * inner
        full_size = sum(spec.sections) * inner
        sections = []
        local = 0
        for indices in spec.ranges(tp.rank, tp.size):
            sections.append((local * inner, indices.start * inner, len(indices) * inner))
            local += len(indices)
    start = part.elements.start
    while start < part.elements.stop:
        left = part.elements.stop - start
        row, column = divmod(start, row_size)
        rows = left // row_size if column == 0 and left >= row_size else 1
        end = min(row_size, column + left)
        for local, full, length in sections:
            first = max(local, column)
            last = min(local + length, end)
            if first < last:
                yield Block(
                    part.place.name,
                    rows,
                    last - first,
                    part.position + start - part.elements.start + first - column,
                    row_size,
                    row * full_size + full + first - local,
                    full_size,
                )
        start += (rows - 1) * row_size + end - column


def key_of(seed: int, step: int, name: str) -> int:
    """The 32 bits, as a signed number, that distinguish the random bits of a weight and a step."""
    digest = hashlib.blake2b(f"{seed} {step} {name}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def as_int32(value: int) -> int:
    """The low 32 bits of a number, as a signed number."""
    return (value + 2**31) % 2**32 - 2**31


def random_bits(key: Tensor, positions: Tensor) -> Tensor:
    """32 random bits for each position, int32.

    The bits are Wellons' hash "lowbias32" (2018), which maps 32 bits to 32 bits one to one, of
    positions and key. Products keep their low 32 bits.

    Args:
        key: Of `key_of`, int32 without dimensions.
        positions: Low 32 bits of positions in the complete weight, int32.
    """
    bits = positions ^ key
    bits = bits ^ ((bits >> 16) & LOW_HALF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * as_int32(0x846CA68B)
    return bits ^ ((bits >> 16) & LOW_HALF)


def is_paired(values: Tensor) -> bool:
    """Whether torch can view a block of bf16, [rows, columns], as pairs in int32."""
    return all(
        size % 2 == 0 for size in (values.storage_offset(), *values.shape[1:], values.stride(0))
    )


def halves(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second bf16 of pairs in int32, as fp32."""
    return (pairs << 16).view(torch.float32), (pairs & HIGH_HALF).view(torch.float32)


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Pairs in int32 of what the functions below return for their first and second bf16."""
    return ((first >> 16) & LOW_HALF) | (second & HIGH_HALF)


def round_to_nearest(values: Tensor) -> Tensor:
    """Round values to the nearest bf16, ties to even.

    Args:
        values: fp32.

    Returns:
        int32 whose high half is a bf16. The low half has no meaning.
    """
    bits = values.view(torch.int32)
    return bits + (((bits >> 16) & 1) + 0x7FFF)


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """Round values to one of the two neighbours that bf16 has, at random, so that the mean is kept.

    The random number is added to the bits that bf16 does not have, which are then dropped: the
    neighbour that is farther from zero is taken as often as the value is close to it.

    Args:
        values: fp32.
        bits: Uniform numbers below 2^16, int32.

    Returns:
        int32 whose high half is a bf16. The low half has no meaning.
    """
    return values.view(torch.int32) + bits
