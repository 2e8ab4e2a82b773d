"""The schedule of a blend: which source gives each sample, for any weights and any length.

After every sample, the number of samples from each source is within one of weight x position: a
proportionally fair (P-fair) schedule, Baruah et al., "Proportionate progress", Algorithmica 1996.
For that, the m-th sample of a source of weight w is released after position (m - 1) / w and has the
deadline m / w. Earliest deadline first meets all deadlines, because the weights sum to 1. Megatron
takes the source that lags behind most; with three or more sources, rare ones may then lag by up to
two samples, so its order differs.

Each choice depends on all previous ones, and a billion choices are too many to compute one by one
or to store. But the counts at a position follow without the order: everything due by then has been
taken, and the remaining positions were filled by the samples with the earliest deadlines. So only
the counts at every BLOCK-th position are computed and stored; the order of a block is computed when
it is read. A longer schedule begins with the shorter one.

Megatron's own order is in `megatron_blend.py`. Knows weights and the index cache, but no token
files.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.blend.blended_dataset import BlendOrder
from megatron_ds.data.blend.megatron_blend import GREEDY_FORMAT, GreedyModel
from megatron_ds.data.index_cache import ArrayCache

BLEND_FORMAT = 3
"""Version of the order and of its stored counts; part of the cache key."""
FAIR = "fair"
"""Rule of this module, in --blend-order."""
BLOCK = 1 << 17
"""Positions whose order is computed at once, in less than a tenth of a second."""
MAX_CACHED_BLOCKS = 2
"""Blocks whose order is kept in memory, 10 bytes per position."""
MAX_SOURCES = int(np.iinfo(np.int16).max)
NEVER = 2.0**62
"""A position beyond any schedule: the deadline of samples with the smallest weights."""
DUE_LIMIT = 2.0**45
"""Deadlines are clipped to this many positions from now, so that they fit an integer key."""
MALLOC_TRIM_LIMIT = 31 << 20
"""Bytes, just below the largest size for which glibc adapts its mmap threshold (32 MiB)."""

Counts = npt.NDArray[np.int64]


class OrderModel(Protocol):
    """Rule of an order, which computes a block from the counts before and after it."""

    def counts(self, size: int) -> npt.NDArray[np.integer]:
        """Samples of each source before every block and at the end, [blocks + 1, sources]."""

    def order(self, start: int, before: Counts, after: Counts) -> npt.NDArray[np.int16]:
        """Source at every position from `start` on, between these counts."""


def order_version(rule: str) -> int:
    """Version of the order by a rule of --blend-order, for `BlendHistory.order`."""
    return BLEND_FORMAT if rule == FAIR else GREEDY_FORMAT


def blend_order(
    weights: Sequence[float], num_samples: int, cache: ArrayCache | None = None, rule: str = FAIR
) -> BlendOrder:
    """Builds the schedule of a blend.

    Args:
        weights: Non-negative weights, which sum to 1 up to rounding.
        num_samples: Length of the schedule.
        cache: Stores the counts of schedules longer than a block.
        rule: FAIR, or another value of --blend-order, which means Megatron's order.

    Raises:
        ValueError: If there are no or too many sources.
        UserError: If the cache is not writable.
    """
    if not 0 < len(weights) <= MAX_SOURCES:
        raise ValueError(f"a blend of {len(weights)} sources; supported are 1 to {MAX_SOURCES}")
    model: OrderModel = _DeadlineModel(weights)
    if rule != FAIR:
        model = GreedyModel(weights, BLOCK)
    if cache is None or num_samples <= BLOCK:
        return BlockSchedule(model, num_samples, model.counts(num_samples))
    key = {
        "format": order_version(rule),
        "weights": [float(weight) for weight in weights],
        "samples": num_samples,
        "block": BLOCK,
    }
    arrays = cache.get_or_build("blend", key, lambda: {"counts": model.counts(num_samples)})
    return BlockSchedule(model, num_samples, arrays["counts"])


class BlockSchedule:
    """The order of a blend, computed block by block. Implements `BlendOrder`.

    Args:
        model: Rule of the order.
        size: Length of the schedule.
        counts: [blocks + 1, sources], samples of each source before every block, and at the end.
    """

    def __init__(self, model: OrderModel, size: int, counts: npt.NDArray[Any]) -> None:
        self._model = model
        self._size = size
        self._counts = counts
        self._blocks: dict[int, tuple[npt.NDArray[np.int16], Counts]] = {}

    def __len__(self) -> int:
        return self._size

    def locate(self, position: int) -> tuple[int, int]:
        block, at = divmod(position, BLOCK)
        source, sample = self._blocks.get(block) or self._compute(block)
        return source.item(at), sample.item(at)

    def counts_at(self, end: int) -> Counts:
        block, at = divmod(end, BLOCK)
        counts: Counts = self._counts[-1 if end == self._size else block].astype(np.int64)
        if at and end < self._size:
            source, _ = self._blocks.get(block) or self._compute(block)
            counts += np.bincount(source[:at], minlength=len(counts))
        return counts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blocks": {}}

    def _compute(self, block: int) -> tuple[npt.NDArray[np.int16], Counts]:
        """Source and sample at every position of a block."""
        before, after = self._counts[block : block + 2].astype(np.int64)
        source = self._model.order(block * BLOCK, before, after)
        sample = np.empty(len(source), dtype=np.int64)
        # Positions grouped by source, in order: each source gives its samples consecutively.
        by_source = np.argsort(source, kind="stable")
        sample[by_source] = _ranges(before, after - before)
        while len(self._blocks) >= MAX_CACHED_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[block] = source, sample
        return source, sample


class _DeadlineModel:
    """Releases and deadlines of samples: positions, counted from 1.

    The m-th sample of a source of weight w is released at floor((m - 1) / w) + 1 and due at
    ceil(m / w).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        array = np.array(weights, dtype=np.float64)
        self._steps = np.full(len(array), NEVER)
        np.divide(1.0, array, out=self._steps, where=array * NEVER > 1)
        self._first = np.where(array > 0, 1.0, NEVER)

    def counts(self, size: int) -> npt.NDArray[np.integer]:
        """Samples of each source before every block and at the end, [blocks + 1, sources]."""
        # glibc returns freed memory to the system unless a block of that size was freed before;
        # new pages for the arrays of each block would take nearly half of the time.
        np.empty(MALLOC_TRIM_LIMIT, dtype=np.uint8)
        ends = [*range(0, size, BLOCK), size]
        dtype = np.int32 if size <= np.iinfo(np.int32).max else np.int64
        rows = np.zeros((len(ends), len(self._steps)), dtype=dtype)
        before = rows[0].astype(np.int64)
        for row, (start, end) in enumerate(itertools.pairwise(ends), 1):
            before = self._counts_after(start, before, end)
            rows[row] = before
        return rows

    def _counts_after(self, start: int, before: Counts, end: int) -> Counts:
        """Counts of each source at position `end`, given those at `start`.

        All samples due by `end` are taken; they leave the same positions free in any order. These
        are filled by the released samples with the earliest deadlines.
        """
        size = end - start
        after = np.maximum(self._due_by(end), before)
        arrivals = np.bincount(self._arrivals(start, before, after), minlength=size)
        surplus = np.arange(1, size + 1)
        surplus -= np.cumsum(arrivals[:size])
        # The number of free positions is the running maximum of positions minus arrivals.
        np.maximum.accumulate(surplus, out=surplus)
        free = np.searchsorted(surplus, np.arange(1, int(surplus[-1]) + 1)) + 1
        self._fill(start, after, free)
        # Corrects rounding: the weights sum to 1 only approximately.
        while (over := int(after.sum()) - end) > 0:
            after[np.argmax(np.where(after > before, after * self._steps, -1))] -= 1
        for _ in range(-over):
            after[np.argmin(self._release(after))] += 1
        return after

    def _fill(self, start: int, after: Counts, free: Counts) -> None:
        """Fills each free position after `start` with the earliest deadline among released samples,
        at most one of each source, and counts them in `after`."""
        if not len(free):
            return
        release = self._release(after) - start
        sources = np.flatnonzero(release <= free[-1])
        sources = sources[np.argsort(release[sources], kind="stable")]
        due = np.ceil((after[sources] + 1) * self._steps[sources])
        urgency = np.empty(len(sources), dtype=np.int64)
        urgency[np.lexsort((sources, due))] = np.arange(len(sources))
        arrived = np.searchsorted(release[sources], free, side="right")
        chosen = _pop_most_urgent(urgency.tolist(), arrived.tolist())
        after[sources[np.argsort(urgency)[chosen]]] += 1

    def order(self, start: int, before: Counts, after: Counts) -> npt.NDArray[np.int16]:
        """Source at every position from `start` on: earliest deadline first.

        Args:
            start: First position.
            before: Counts of each source before these positions.
            after: Counts after them.
        """
        sources = len(self._steps)
        source = np.repeat(np.arange(sources), after - before)
        arrivals = self._arrivals(start, before, after)
        last = (_ranges(before, after - before) + 1) * self._steps[source]
        due = np.minimum(np.ceil(last) - start, DUE_LIMIT).astype(np.int64)
        # One integer key per sample: ordered by deadline, then by source.
        keys = (due * sources + source)[np.argsort(arrivals, kind="stable")]
        arrived = np.cumsum(np.bincount(arrivals, minlength=len(source)))[: len(source)]
        taken = _pop_most_urgent(keys.tolist(), arrived.tolist())
        return (np.array(taken, dtype=np.int64) % sources).astype(np.int16)

    def _arrivals(self, start: int, before: Counts, after: Counts) -> Counts:
        """Releases of the samples from `before` to `after`, by source, relative to `start`."""
        position = _ranges(before, after - before).astype(np.float64)
        position *= np.repeat(self._steps, after - before)
        np.maximum(position, start, out=position)
        arrivals = position.astype(np.int64)
        arrivals -= start
        return arrivals

    def _release(self, counts: Counts) -> npt.NDArray[np.float64]:
        """Release of the next sample of each source."""
        release: npt.NDArray[np.float64] = np.floor(counts * self._steps) + 1
        return np.maximum(release, self._first)

    def _due_by(self, position: int) -> Counts:
        """Samples of each source due by a position: the largest m with m / w <= position."""
        count = np.floor(position / self._steps)
        count += (count + 1) * self._steps <= position
        count -= count * self._steps > position
        return count.astype(np.int64)


def _pop_most_urgent(keys: list[int], arrived: list[int]) -> list[int]:
    """Takes the smallest released key at each step.

    Args:
        keys: Keys in the order of their release.
        arrived: Number of released keys at each step. If none is left at a step, due to rounding,
            the next one to be released is taken.
    """
    ready: list[int] = []
    taken = []
    at = 0
    for end in arrived:
        if at + 1 == end:
            taken.append(heapq.heappushpop(ready, keys[at]))
            at = end
            continue
        for key in keys[at:end]:
            heapq.heappush(ready, key)
        at = max(at, end)
        if ready:
            taken.append(heapq.heappop(ready))
        elif at < len(keys):
            taken.append(keys[at])
            at += 1
    return taken


def _ranges(first: Counts, count: Counts) -> Counts:
    """Concatenates range(first[i], first[i] + count[i]) for all i."""
    ends = np.cumsum(count)
    numbers = np.arange(ends[-1])
    numbers += np.repeat(first - (ends - count), count)
    return numbers
