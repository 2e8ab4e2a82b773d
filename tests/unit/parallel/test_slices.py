"""Slices of sequences: every token is on one rank, and all ranks have as much work."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.parallel.context.slices import SequenceSlices, in_rank_order, in_sequence_order
from megatron_ds.parallel.mesh import Group


def group(size: int, rank: int) -> Group:
    return Group(tuple(range(size)), rank, None)


def slices_of(length: int, cp: int, ulysses: int) -> list[SequenceSlices]:
    """Those of all ranks, in their order."""
    return [
        SequenceSlices.of(length, group(cp, outer), group(ulysses, inner))
        for outer in range(cp)
        for inner in range(ulysses)
    ]


def test_slices_are_those_of_a_table_written_by_hand() -> None:
    parts = [slices.parts for slices in slices_of(16, 2, 1)]
    assert parts == [(range(4), range(12, 16)), (range(4, 12),)]
    parts = [slices.parts for slices in slices_of(16, 2, 2)]
    assert parts == [(range(4),), (range(12, 16),), (range(4, 8),), (range(8, 12),)]
    # Of three Ulysses ranks, the second has the end of one chunk and the start of the other.
    parts = [slices.parts for slices in slices_of(24, 2, 3)]
    assert parts[:3] == [(range(4),), (range(4, 6), range(18, 20)), (range(20, 24),)]
    assert SequenceSlices.of(16, group(2, 0)).parts == (range(4), range(12, 16))


@pytest.mark.parametrize(("cp", "ulysses"), [(1, 1), (1, 4), (2, 1), (2, 3), (4, 2), (3, 1)])
def test_every_token_is_on_one_rank(cp: int, ulysses: int) -> None:
    length = 2 * cp * ulysses * 5
    tokens = torch.arange(2 * length).view(2, length)
    all_slices = slices_of(length, cp, ulysses)
    own = [slices.take(tokens, 1) for slices in all_slices]
    assert {part.shape[1] for part in own} == {slices.size for slices in all_slices}
    assert torch.equal(in_sequence_order(torch.cat(own, dim=1), 1, cp), tokens)
    assert torch.equal(in_rank_order(tokens, 1, cp), torch.cat(own, dim=1))
    for slices, part in zip(all_slices, own, strict=True):
        positions = slices.positions(torch.device("cpu"))
        assert torch.equal(part[0], positions)
        assert (slices.start, slices.stop - 1) == (positions[0], positions[-1])
        assert slices.is_contiguous == (len(positions) == 1 + positions[-1] - positions[0])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_ranks_have_as_many_visible_keys(size: int) -> None:
    each = [SequenceSlices.of(16 * size, group(size, rank)) for rank in range(size)]
    keys = {int((slices.positions(torch.device("cpu")) + 1).sum()) for slices in each}
    assert len(keys) == 1


def test_one_rank_has_a_view_of_everything() -> None:
    tokens = torch.arange(15).view(3, 5)
    (slices,) = slices_of(5, 1, 1)
    assert slices.take(tokens, 1).data_ptr() == tokens.data_ptr()
    assert in_sequence_order(tokens, 1, 1) is in_rank_order(tokens, 1, 1) is tokens
