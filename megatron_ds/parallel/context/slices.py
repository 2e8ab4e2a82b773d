"""Slices of sequences, by rank arithmetic.

Each of the N ranks of a context-parallel group has two chunks of a sequence (`layout`).
These S / N tokens are cut into contiguous slices, one for each rank of a Ulysses group.

Shapes: S sequence, N size of the context-parallel group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.parallel.context.layout import CHUNKS, chunks_of
from megatron_ds.parallel.mesh import Group


@dataclass(frozen=True)
class SequenceSlices:
    """The tokens of every sequence that this rank has.

    Args:
        parts: Their positions, in the order in which the rank has them.
    """

    parts: tuple[range, ...]

    @classmethod
    def of(cls, length: int, cp: Group, ulysses: Group | None = None) -> SequenceSlices:
        """The slices of this rank.

        Args:
            length: Tokens of a sequence.
            cp: Context-parallel group.
            ulysses: Ulysses group. None: the slices are those that its ranks have together.
        """
        chunks = [range(length)]
        if cp.size > 1:
            count = CHUNKS * cp.size
            assert length % count == 0, f"{length} is not divisible by {count}"
            size = length // count
            starts = [chunk * size for chunk in chunks_of(cp.rank, cp.size)]
            chunks = [range(start, start + size) for start in starts]
        if ulysses is not None:
            chunks = _contiguous_slice(chunks, length // cp.size, ulysses)
        if len(chunks) == 2 and chunks[0].stop == chunks[1].start:  # the middle of the sequence
            chunks = [range(chunks[0].start, chunks[1].stop)]
        return cls(tuple(chunks))

    @property
    def size(self) -> int:
        """Number of tokens."""
        return sum(map(len, self.parts))

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.parts[0].start

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.parts[-1].stop

    @property
    def is_contiguous(self) -> bool:
        """Whether the tokens follow each other."""
        return len(self.parts) == 1

    def take(self, x: Tensor, dim: int) -> Tensor:
        """The tokens' part of a dimension of complete sequences; a view if they are contiguous."""
        parts = [x.narrow(dim, part.start, len(part)) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, device: torch.device) -> Tensor:
        """Positions of the tokens, int64."""
        parts = [torch.arange(part.start, part.stop, device=device) for part in self.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_sequence_order(x: Tensor, dim: int, size: int) -> Tensor:
    """Reorder the concatenated slices of all ranks to complete sequences.

    Args:
        x: Slices of the context-parallel ranks in the order of the ranks.
        dim: Dimension of the sequence.
        size: Size of the context-parallel group, N.
    """
    if size == 1:
        return x
    chunks = x.chunk(CHUNKS * size, dim)
    return torch.cat([*chunks[::2], *chunks[::-2]], dim)


def in_rank_order(x: Tensor, dim: int, size: int) -> Tensor:
    """The inverse of `in_sequence_order`."""
    if size == 1:
        return x
    chunks = x.chunk(CHUNKS * size, dim)
    pairs = zip(chunks[:size], reversed(chunks[size:]), strict=True)
    return torch.cat([chunk for pair in pairs for chunk in pair], dim)


def _contiguous_slice(chunks: list[range], tokens: int, ulysses: Group) -> list[range]:
    """The parts of chunks with together `tokens` tokens that a Ulysses rank has."""
    assert tokens % ulysses.size == 0, f"{tokens} is not divisible by {ulysses.size}"
    size = tokens // ulysses.size
    start = ulysses.rank * size
    parts = []
    for chunk in chunks:
        part = chunk[max(start, 0) : max(start + size, 0)]
        if len(part) > 0:
            parts.append(part)
        start -= len(chunk)
    return parts
