"""Blocks of context-parallel attention in segments of documents and windows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ds.model.attention.blocks import (
    ExplicitBlocks,
    HostFlashBlocks,
    Kernel,
    Part,
    document_starts,
)
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.model.attention.segments import SegmentBlocks, document_bounds
from megatron_ds.parallel.context.layout import Block, VisibleKeys

TOKENS = 600
WIDTH = 200
"""Tokens of a block's queries, and of its keys."""
ROWS = [[250, 1, 1, 348], [600]], [[7] * 85 + [5], [13] * 46 + [2]]
"""Tokens of the documents of each text."""


def ids_of(lengths: list[list[int]]) -> Tensor:
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows).int()


@pytest.mark.parametrize("lengths", [None, *ROWS], ids=["one", "few", "many"])
@pytest.mark.parametrize("window", [None, 1, 70, 130, 500])
@pytest.mark.parametrize("first_key", [400, 200, 0], ids=["same", "before", "far before"])
def test_segments_have_the_attention_and_gradients_of_explicit_scores(
    lengths: list[list[int]] | None, window: int | None, first_key: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    ids_BS = None if lengths is None else ids_of(lengths)
    starts = None if ids_BS is None else document_starts(ids_BS)
    bounds = None if ids_BS is None else document_bounds(ids_BS)
    rule = AttentionRule(window=window)
    explicit = ExplicitBlocks(rule, VisibleKeys(window, starts), None, ids_BS)
    segments = SegmentBlocks(HostFlashBlocks(), window, bounds)
    every = slice(0, WIDTH)
    block = Block(every, every, first_key == 400, 400, first_key)
    q, k, v, grad = (torch.randn(2, heads, WIDTH, 8, generator=generator) for heads in (4, 2, 2, 4))
    expected, computed = (kernel.forward(q, k, v, block) for kernel in (explicit, segments))
    torch.testing.assert_close(computed.log_sum, expected.log_sum)
    torch.testing.assert_close(computed.attended, expected.attended)
    # The sum over all keys, of which the block has some.
    other = Part(expected.attended, expected.log_sum.logaddexp(torch.zeros(())))

    def gradients(kernel: Kernel) -> list[Tensor]:
        return list(kernel.backward(grad, q, k, v, other, block))

    for found, reference in zip(gradients(segments), gradients(explicit), strict=True):
        torch.testing.assert_close(found, reference)


def test_segments_leave_out_what_no_query_sees() -> None:
    """Documents of another block, keys before a window, and queries after it."""
    bounds = document_bounds(ids_of([[250, 350]]))
    segments = SegmentBlocks(HostFlashBlocks(), None, bounds)
    x = torch.zeros(1, 1, WIDTH, 8)
    every = slice(0, WIDTH)
    (before,) = segments._by_form(x, x, Block(every, every, False, 400, 200))
    assert [(each.queries, each.keys) for each in before] == [(slice(0, 200), slice(50, 200))]
    assert not list(segments._by_form(x, x, Block(every, every, False, 400, 0)))
    windowed = SegmentBlocks(HostFlashBlocks(), 11)
    ((edge,),) = windowed._by_form(x, x, Block(every, every, False, 400, 200))
    assert (edge.queries, edge.keys) == (slice(0, 10), slice(190, 200))
