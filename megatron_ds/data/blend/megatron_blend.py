"""Megatron's rules for blends: the order of the samples, and how many are requested of a source.

At every position i, the source with the largest weight x max(i, 1) - samples so far is read, in
double precision, and of equal ones the first. Each choice depends on all before it. But two orders
that begin with different counts soon become equal, because both read what lags behind. Many parts
of an order are therefore computed at once, each from a guess of its first counts; a part whose
guess differs from the last counts of the part before it is computed again. The result is exact.

Knows weights alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

GREEDY_FORMAT = 1001
"""Version of the order, different from the versions of `blend_schedule`."""
MAX_PARTS = 1024
"""Parts that are computed at once."""
MAX_ELEMENTS = 1 << 21
"""Counts of all parts, 16 MB."""
SHORTEST_PART = 512
"""Positions."""
SURPLUS = 0.005
"""Share of further samples that Megatron requests of each source."""

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1, with Megatron's rounding."""
    array = np.array(weights, dtype=np.float64)
    shares: list[float] = (array / np.sum(array)).tolist()
    return shares


def core_samples_per_source(weights: Sequence[float], num_samples: int) -> list[int]:
    """Number of samples that Megatron Core requests of each source.

    Args:
        weights: Weights of the sources, normalized once.
        num_samples: Samples of the blend.
    """
    return [math.ceil(math.ceil(num_samples * weight) * (1 + SURPLUS)) for weight in weights]


class GreedyModel:
    """Megatron's order of a blend. Implements `OrderModel`.

    Args:
        weights: Weights of the sources, normalized.
        block: Positions whose order is computed at once.
    """

    def __init__(self, weights: Sequence[float], block: int) -> None:
        self._weights = np.array(weights, dtype=np.float64)
        self._block = block

    def counts(self, size: int) -> npt.NDArray[np.integer]:
        """Samples of each source before every block and at the end, [blocks + 1, sources]."""
        dtype = np.int32 if size <= np.iinfo(np.int32).max else np.int64
        rows = np.zeros((math.ceil(size / self._block) + 1, len(self._weights)), dtype=dtype)
        length = self._part_length(size)
        before = np.zeros(len(self._weights))
        at = 0
        while at + length <= size:
            parts = min(self._max_parts(), (size - at) // length)
            counts, _ = self._compute(at, before, parts, length)
            ends = at + length * np.arange(1, parts + 1)
            whole = ends % self._block == 0
            rows[ends[whole] // self._block] = counts[1:][whole]
            before = counts[-1]
            at += length * parts
        if at < size:
            rest = self._order(at, before, size - at)
            before = before + np.bincount(rest, minlength=len(before))
        rows[-1] = before
        return rows

    def order(self, start: int, before: Counts, after: Counts) -> npt.NDArray[np.int16]:
        """Source at every position from `start` on, until the counts equal `after`."""
        return self._order(start, before.astype(np.float64), int(after.sum() - before.sum()))

    def _order(self, start: int, before: Floats, size: int) -> npt.NDArray[np.int16]:
        parts = min(self._max_parts(), math.ceil(size / SHORTEST_PART))
        _, chosen = self._compute(start, before, parts, math.ceil(size / parts), keep_order=True)
        return chosen.T.reshape(-1)[:size]

    def _part_length(self, size: int) -> int:
        """Positions of a part: a block is a multiple of it."""
        per_block = 1
        while self._block % (2 * per_block) == 0 and (
            self._block // (2 * per_block) >= max(SHORTEST_PART, size / MAX_PARTS)
        ):
            per_block *= 2
        return self._block // per_block

    def _max_parts(self) -> int:
        return max(1, min(MAX_PARTS, MAX_ELEMENTS // len(self._weights)))

    def _compute(
        self, start: int, before: Floats, parts: int, length: int, *, keep_order: bool = False
    ) -> tuple[Floats, npt.NDArray[np.int16]]:
        """Computes consecutive parts of the order.

        Args:
            start: First position.
            before: Counts at this position.
            parts: Number of parts.
            length: Positions of each part.
            keep_order: Return the order, too.

        Returns:
            Counts before each part and at the end, [parts + 1, sources], and the source of each
            position, [length, parts], empty without `keep_order`.
        """
        first = start + length * np.arange(parts)
        chosen = np.empty((length if keep_order else 0, parts), dtype=np.int16)
        warmup = min(length, max(64, 4 * len(self._weights)))
        begin = np.empty((parts, len(self._weights)))
        begin[0] = before
        begin[1:] = self._guess(first[1:] - warmup)
        self._advance(first[1:] - warmup, begin[1:], warmup, chosen[:0])
        end = begin.copy()
        wrong = np.arange(parts)
        while len(wrong):
            counts = begin[wrong]
            order = chosen[:, wrong]
            self._advance(first[wrong], counts, length, order)
            end[wrong] = counts
            chosen[:, wrong] = order
            wrong = np.flatnonzero((begin[1:] != end[:-1]).any(axis=1)) + 1
            begin[wrong] = end[wrong - 1]
        return np.concatenate([begin, end[-1:]]), chosen

    def _guess(self, positions: Counts) -> Floats:
        """Counts at positions, about in proportion; counts of rare sources are too low rather
        than too high, because missing samples are read next."""
        sources = len(self._weights)
        expected = self._weights * positions[:, None]
        counts = np.maximum(np.floor(expected + 1.5 * sources * self._weights - 1), 0)
        for row, target, position in zip(counts, expected, positions, strict=True):
            while (missing := int(position - row.sum())) != 0:
                if missing > 0:
                    row += missing // sources
                    row[np.argsort(row - target)[: missing % sources]] += 1
                else:
                    most = np.argsort(target - row)[:-missing]
                    row[most[row[most] > 0]] -= 1
        return counts

    def _advance(
        self, first: Counts, counts: Floats, length: int, order: npt.NDArray[np.int16]
    ) -> None:
        """Takes the next samples of several parts, and adds them to their counts in place.

        Args:
            first: First position of each part.
            counts: Counts at these, [parts, sources].
            length: Positions of each part.
            order: The sources are written here, [length, parts], unless it is empty.
        """
        position = first.astype(np.float64)
        flat = counts.reshape(-1)
        rows = np.arange(len(first)) * counts.shape[1]
        lag = np.empty_like(counts)
        for step in range(length):
            # The same operations in double precision as Megatron's, in the same order.
            np.multiply(np.maximum(position, 1.0)[:, None], self._weights, out=lag)
            np.subtract(lag, counts, out=lag)
            source = lag.argmax(axis=1)
            flat[rows + source] += 1
            if len(order):
                order[step] = source
            position += 1
