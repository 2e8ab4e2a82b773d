"""Flash attention of blocks in which documents or a window hide keys.

A block is computed in segments: the queries and keys of one document, and with a window some
queries and the keys that they see. Keys that no query of a segment sees are left out; only at the
ends of a window is there a mask.

Shapes: B micro-batch, S queries, L keys, n query heads, k key-value heads, D head size, V that of
the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ds.model.attention.blocks import (
    QUERIES_AT_ONCE,
    FlashBlocks,
    Gradients,
    HostFlashBlocks,
    Part,
)
from megatron_ds.parallel.context.layout import Block

LEAST_QUERIES = 64
"""Queries of a segment with a short window. Fewer leave out few keys and need more calls."""


def document_bounds(documents_BS: Tensor) -> list[list[int]]:
    """Positions of each text at which documents start, and its length.

    Synchronizes with the device.

    Args:
        documents_BS: Numbers of the tokens' documents, which do not decrease.
    """
    rows = documents_BS.cpu()
    lengths = (row.unique_consecutive(return_counts=True)[1] for row in rows)
    return [[0, *counts.cumsum(0).tolist()] for counts in lengths]


class Segment(NamedTuple):
    """Queries and keys of a block that are computed together."""

    rows: slice
    """Which of the texts."""
    queries: slice
    """Which of the block's queries. Each sees a key."""
    keys: slice
    """Which of its keys."""
    is_causal: bool
    """Whether later keys are hidden; there are then as many as queries, at the same positions."""
    shift: int | None
    """Position of the first query relative to the first key, if a window or the causal mask hides
    some keys in another way. None: otherwise all are visible."""

    @property
    def form(self) -> tuple[int, int, bool, int | None]:
        """Segments of the same form can be computed by one call."""
        queries = self.queries.stop - self.queries.start
        keys = self.keys.stop - self.keys.start
        return queries, keys, self.is_causal, self.shift


@dataclass(frozen=True)
class SegmentBlocks:
    """Computes blocks in segments."""

    flash: HostFlashBlocks | FlashBlocks
    """Computes a segment. On devices, there is no window."""
    window: int | None = None
    """Keys that a query attends to. None: all."""
    bounds: Sequence[Sequence[int]] | None = None
    """`document_bounds`, if attention ends with a document."""
    _masks: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    needs_positions = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Part:
        attended = q.new_zeros(*q.shape[:3], v.shape[-1])
        log_sum = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)
        for segments in self._by_form(q, k, block):
            inputs = _queries_of(segments, q), _keys_of(segments, k), _keys_of(segments, v)
            part = self.flash.forward(*inputs, *self._options(segments[0], block, q))
            for total, computed in ((attended, part.attended), (log_sum, part.log_sum)):
                for segment, rows in _split(segments, computed):
                    total[segment.rows, :, segment.queries] = rows
        return Part(attended, log_sum)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, complete: Part, block: Block
    ) -> Gradients:
        grads = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
        for segments in self._by_form(q, k, block):
            attention = Part(*(_queries_of(segments, x) for x in complete))
            inputs = (
                _queries_of(segments, grad),
                _queries_of(segments, q),
                _keys_of(segments, k),
                _keys_of(segments, v),
            )
            computed = self.flash.backward(
                *inputs, attention, *self._options(segments[0], block, q)
            )
            for segment, rows in _split(segments, computed.q):
                grads[0][segment.rows, :, segment.queries] += rows
            for total, summand in ((grads[1], computed.k), (grads[2], computed.v)):
                for segment, rows in _split(segments, summand):
                    total[segment.rows, :, segment.keys] += rows
        return Gradients(*grads)

    def _by_form(self, q: Tensor, k: Tensor, block: Block) -> Iterator[list[Segment]]:
        """The segments that one call computes."""
        queries = range(block.first_query, block.first_query + q.shape[2])
        keys = range(block.first_key, block.first_key + k.shape[2])
        by_form: dict[object, list[Segment]] = {}
        for rows, document in self._documents(queries):
            for segment in self._segments(rows, document, queries, keys):
                by_form.setdefault(segment.form, []).append(segment)
        yield from by_form.values()

    def _documents(self, queries: range) -> Iterator[tuple[slice, range]]:
        """The texts and positions of documents that have some of the queries."""
        if self.bounds is None:
            yield slice(None), range(queries.stop)
            return
        for row, bounds in enumerate(self.bounds):
            for start, end in pairwise(bounds):
                if start < queries.stop and end > queries.start:
                    yield slice(row, row + 1), range(start, end)

    def _segments(
        self, rows: slice, document: range, queries: range, keys: range
    ) -> Iterator[Segment]:
        """The segments of a document, in positions of the sequence."""
        first = max(document.start, queries.start)
        end = min(document.stop, queries.stop)
        window = self.window or end
        size = max(window, LEAST_QUERIES)
        size = end - first if end - document.start <= window else min(size, QUERIES_AT_ONCE)
        for start in range(first, end, size):
            first_key = max(document.start, keys.start, start - window + 1)
            stop = min(start + size, end)
            end_key = min(keys.stop, stop)
            stop = min(stop, end_key + window - 1)  # later queries see no key
            if first_key >= end_key or start >= stop:
                continue
            is_inside = stop - first_key <= window
            is_causal = is_inside and start == first_key and stop == end_key
            is_masked = not (is_causal or (is_inside and end_key <= start + 1))
            yield Segment(
                rows,
                slice(start - queries.start, stop - queries.start),
                slice(first_key - keys.start, end_key - keys.start),
                is_causal,
                start - first_key if is_masked else None,
            )

    def _options(
        self, segment: Segment, block: Block, like: Tensor
    ) -> tuple[Block] | tuple[Block, Tensor]:
        """A segment as a block, and its mask if it has one."""
        options = block._replace(is_causal=segment.is_causal)
        if segment.shift is None:
            return (options,)
        key = segment.form[0], segment.form[1], segment.shift
        if key not in self._masks:
            keys = torch.arange(key[1], device=like.device)
            queries = torch.arange(key[0], device=like.device).unsqueeze(1) + segment.shift
            hidden = keys > queries
            if self.window is not None:
                hidden |= keys <= queries - self.window
            mask = like.new_zeros(key[:2]).masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask[None, None]
        return options, self._masks[key]


def _queries_of(segments: list[Segment], x: Tensor) -> Tensor:
    """The segments' queries of [B, n, S, ...], as further rows."""
    parts = [x[segment.rows, :, segment.queries] for segment in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _keys_of(segments: list[Segment], x: Tensor) -> Tensor:
    """The segments' keys of [B, k, L, D], as further rows."""
    parts = [x[segment.rows, :, segment.keys] for segment in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(segments: list[Segment], x: Tensor) -> Iterator[tuple[Segment, Tensor]]:
    """The inverse of both: each segment and its rows."""
    return zip(segments, x.chunk(len(segments)), strict=True)
