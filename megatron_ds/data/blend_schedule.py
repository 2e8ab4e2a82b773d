"""The order of a blend: which source gives each sample, for any weights and any length.

After every sample each source has given its share of all so far, within less than one sample. For
that the m-th sample of a source of weight w must come after position (m - 1) / w and not after
m / w; of the samples whose time has come the most urgent is taken, which meets all of these bounds
because the weights' sum is 1. Megatron takes the source that lags most behind, which lets rare
sources of three or more lag by up to two samples; so its order is another.

Each choice depends on all before it, and a billion choices are too many to make one by one or to
keep. But what each source has given by a position can be told without the order: what is due by
then has been taken, and of what is not yet due the most urgent has filled the positions that were
left. So only these counts are made and kept, for every BLOCK-th position, and the order of a block
is made when it is read; a longer order begins with the shorter.

Knows weights and the index cache; no files of tokens.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.data.blended_dataset import BlendOrder
from megatron_ds.data.index_cache import ArrayCache, Arrays

BLEND_FORMAT = 3
"""Raised when the same weights begin to give another order, or what is kept of it changes."""
BLOCK = 1 << 17
"""Positions whose order is made at once: less than a tenth of a second of work."""
BLOCKS_KEPT = 2
"""Blocks whose order stays in memory, 10 bytes a position."""
MAX_SOURCES = int(np.iinfo(np.int16).max)
NEVER = 2.0**62
"""A position that no order reaches: where the samples of the smallest weights would be due."""
LATE = 2.0**45
"""Due after this many further positions is as good as never."""
FREED = 31 << 20
"""Bytes, just below the size at which glibc no longer follows what is freed."""

Counts = npt.NDArray[np.int64]


def blend_order(
    weights: Sequence[float], num_samples: int, cache: ArrayCache | None = None
) -> BlendOrder:
    """The order of `num_samples` samples of sources of these weights.

    weights: not negative, their sum 1 but for rounding; a source of weight 0 gives nothing. cache:
    keeps the counts of orders that are longer than a block. Raises ValueError for an impossible
    number of sources, and if the cache cannot be written.
    """
    if not 0 < len(weights) <= MAX_SOURCES:
        raise ValueError(f"a blend of {len(weights)} sources; possible are 1 to {MAX_SOURCES}")
    jobs = _DeadlineModel(weights)

    def make() -> Arrays:
        return {"counts": jobs.counts(num_samples, BLOCK)}

    if cache is None or num_samples <= BLOCK:
        counts = make()["counts"]
    else:
        decides = {
            "format": BLEND_FORMAT,
            "weights": [float(weight) for weight in weights],
            "samples": num_samples,
            "block": BLOCK,
        }
        counts = cache.get_or_build("blend", decides, make)["counts"]
    return EarliestDeadlineSchedule(jobs, num_samples, counts, BLOCK)


class EarliestDeadlineSchedule:
    """The order itself, made block by block from what the sources have given before each.

    counts [blocks + 1, sources]: samples that each source has given before every block; the last
    row is at the end.
    """

    def __init__(
        self, jobs: _DeadlineModel, size: int, counts: npt.NDArray[Any], block: int
    ) -> None:
        self._jobs = jobs
        self._size = size
        self._counts = counts
        self._block = block
        self._made: dict[int, tuple[npt.NDArray[np.int16], Counts]] = {}

    def __len__(self) -> int:
        return self._size

    def locate(self, position: int) -> tuple[int, int]:
        block, at = divmod(position, self._block)
        source, sample = self._made.get(block) or self._make(block)
        return source.item(at), sample.item(at)

    def counts_at(self, end: int) -> Counts:
        block, at = divmod(end, self._block)
        if end == self._size:
            return np.array(self._counts[-1], dtype=np.int64)
        counts = np.array(self._counts[block], dtype=np.int64)
        if at:
            source, _ = self._made.get(block) or self._make(block)
            counts += np.bincount(source[:at], minlength=len(counts))
        return counts

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": {}}

    def _make(self, block: int) -> tuple[npt.NDArray[np.int16], Counts]:
        """Source and sample of every position of a block."""
        before, after = self._counts[block : block + 2].astype(np.int64)
        source = self._jobs.order(block * self._block, before, after)
        sample = np.empty(len(source), dtype=np.int64)
        # Positions by source, in order: the samples of each are the next of its own.
        by_source = np.argsort(source, kind="stable")
        sample[by_source] = _ranges(before, after - before)
        while len(self._made) >= BLOCKS_KEPT:
            del self._made[next(iter(self._made))]
        self._made[block] = source, sample
        return source, sample


class _DeadlineModel:
    """Every sample of every source as a piece of work with a window of positions, from 1 on.

    The m-th sample of a source is released at floor((m - 1) / w) + 1 and due at ceil(m / w).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        given = np.array(weights, dtype=np.float64)
        self._steps = np.full(len(given), NEVER)
        np.divide(1.0, given, out=self._steps, where=given * NEVER > 1)
        self._first = np.where(given > 0, 1.0, NEVER)

    def counts(self, size: int, block: int) -> npt.NDArray[np.integer]:
        """[blocks + 1, sources]: what each source has given before every block, and at the end."""
        # glibc gives freed memory back to the system if it is larger than what was freed before;
        # fresh pages for the arrays of each block would take nearly half of the time.
        np.empty(FREED, dtype=np.uint8)
        ends = [*range(0, size, block), size]
        dtype = np.int32 if size <= np.iinfo(np.int32).max else np.int64
        rows = np.zeros((len(ends), len(self._steps)), dtype=dtype)
        before = rows[0].astype(np.int64)
        for row, (start, end) in enumerate(itertools.pairwise(ends), 1):
            before = self._counts_after(start, before, end)
            rows[row] = before
        return rows

    def _counts_after(self, start: int, before: Counts, end: int) -> Counts:
        """What each source has given by position `end`. before: the same by `start`.

        All that is due by `end` is done, and leaves the same positions free in whichever order it
        is done; these take of what is not due by then the most urgent.
        """
        size = end - start
        after = np.maximum(self._due_by(end), before)
        arrivals = np.bincount(self._arrivals(start, before, after), minlength=size)
        surplus = np.arange(1, size + 1)
        surplus -= np.cumsum(arrivals[:size])
        # As many positions are free up to each as ever had come more positions than work.
        np.maximum.accumulate(surplus, out=surplus)
        free = np.searchsorted(surplus, np.arange(1, int(surplus[-1]) + 1)) + 1
        self._fill(start, after, free)
        # Nothing is left to do where the weights' sum is exactly 1; theirs is rounded.
        while (over := int(after.sum()) - end) > 0:
            after[np.argmax(np.where(after > before, after * self._steps, -1))] -= 1
        for _ in range(-over):
            after[np.argmin(self._release(after))] += 1
        return after

    def _fill(self, start: int, after: Counts, free: Counts) -> None:
        """Gives each free position after `start` to the most urgent sample that can be taken there,
        one of each source at most, and counts these in `after`."""
        if not len(free):
            return
        release = self._release(after) - start
        number = np.flatnonzero(release <= free[-1])
        number = number[np.argsort(release[number], kind="stable")]
        due = np.ceil((after[number] + 1) * self._steps[number])
        urgency = np.empty(len(number), dtype=np.int64)
        urgency[np.lexsort((number, due))] = np.arange(len(number))
        arrived = np.searchsorted(release[number], free, side="right")
        chosen = _most_urgent(urgency.tolist(), arrived.tolist())
        after[number[np.argsort(urgency)[chosen]]] += 1

    def order(self, start: int, before: Counts, after: Counts) -> npt.NDArray[np.int16]:
        """Source of every position from `start` on, the most urgent of what is released first.

        before, after: what each source has given before and after these positions.
        """
        sources = len(self._steps)
        source = np.repeat(np.arange(sources), after - before)
        arrivals = self._arrivals(start, before, after)
        last = (_ranges(before, after - before) + 1) * self._steps[source]
        due = np.minimum(np.ceil(last) - start, LATE).astype(np.int64)
        # One number that is the smaller the sooner the sample is due; among equals by source.
        keys = (due * sources + source)[np.argsort(arrivals, kind="stable")]
        arrived = np.cumsum(np.bincount(arrivals, minlength=len(source)))[: len(source)]
        taken = _most_urgent(keys.tolist(), arrived.tolist())
        return (np.array(taken, dtype=np.int64) % sources).astype(np.int16)

    def _arrivals(self, start: int, before: Counts, after: Counts) -> Counts:
        """For every sample from `before` to `after`, source by source, the position at which it can
        be taken: 0 for the first after `start`."""
        position = _ranges(before, after - before).astype(np.float64)
        position *= np.repeat(self._steps, after - before)
        np.maximum(position, start, out=position)
        arrivals = position.astype(np.int64)
        arrivals -= start
        return arrivals

    def _release(self, taken: Counts) -> npt.NDArray[np.float64]:
        """First position at which each source's next sample can be taken."""
        release: npt.NDArray[np.float64] = np.floor(taken * self._steps) + 1
        return np.maximum(release, self._first)

    def _due_by(self, position: int) -> Counts:
        """How many samples of each source are due by a position: the largest m, m / w <= it."""
        count = np.floor(position / self._steps)
        count += (count + 1) * self._steps <= position
        count -= count * self._steps > position
        return count.astype(np.int64)


def _most_urgent(keys: list[int], arrived: list[int]) -> list[int]:
    """At each turn the smallest key of those that have come and were not taken before.

    keys: in the order in which they come. arrived: how many have come at each turn. Rounding may
    let a key come late: where none is there, the next one to come is taken.
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
    """first[0], first[0] + 1, ... `count[0]` of them, then those of first[1], and so on."""
    ends = np.cumsum(count)
    numbers = np.arange(ends[-1])
    numbers += np.repeat(first - (ends - count), count)
    return numbers
