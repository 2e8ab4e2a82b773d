"""Datasets that take their samples from several others: blends and concatenations.

Knows datasets and the order of a blend, but not how either is made.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.sample import NO_MARKS, IdArray, MarkArray
from megatron_ds.data.sample_index import IntArray
from megatron_ds.data.token_dataset import Piece, TokenDataset


class BlendOrder(Protocol):
    """Maps each position of a blend to a source and one of its samples."""

    def __len__(self) -> int: ...

    def locate(self, position: int) -> tuple[int, int]:
        """Index of the source and of its sample at a position, 0 <= position < len."""

    def counts_at(self, end: int) -> npt.NDArray[np.int64]:
        """Samples of each source within the first `end` positions, [number of sources]."""


class SingleSourceOrder:
    """The order of a single source."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def locate(self, position: int) -> tuple[int, int]:
        return 0, position

    def counts_at(self, end: int) -> npt.NDArray[np.int64]:
        return np.array([end], dtype=np.int64)


class RoutingDataset:
    """Reads each sample from one of several datasets of equal seq_length and vocab_size."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        self._datasets = tuple(datasets)
        self.seq_length = datasets[0].seq_length
        self.vocab_size = datasets[0].vocab_size
        self.marks = functools.reduce(operator.or_, (one.marks for one in datasets), NO_MARKS)
        self.cache = next((source.cache for source in datasets if source.cache is not None), None)

    def __getitem__(self, position: int) -> IdArray:
        index, sample = self._locate(position)
        return self._datasets[index][sample]

    def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        index, sample = self._locate(position)
        self._datasets[index].read_into(sample, ids, marks)

    def sample_id(self, position: int) -> str:
        index, sample = self._locate(position)
        return f"{index}/{self._datasets[index].sample_id(sample)}"

    def pieces(self, position: int) -> Iterator[Piece]:
        index, sample = self._locate(position)
        return self._datasets[index].pieces(sample)

    def _locate(self, position: int) -> tuple[int, int]:
        """Index of the dataset and of its sample.

        Raises:
            IndexError: If there is no such position.
        """
        raise NotImplementedError


class ConcatDataset(RoutingDataset):
    """Concatenation of the datasets of one source."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        super().__init__(datasets)
        self._ends = list(itertools.accumulate(len(dataset) for dataset in datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def sample_id(self, position: int) -> str:
        index, local = self._locate(position)
        suffix = f"+{index}" if index else ""
        return f"{self._datasets[index].sample_id(local)}{suffix}"

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a dataset of {len(self)}")
        index = bisect.bisect_right(self._ends, position)
        return index, position - (self._ends[index - 1] if index else 0)

    def positions_of(self, prefix: str, sequences: IntArray) -> IntArray:
        positions = (dataset.positions_of(prefix, sequences) for dataset in self._datasets)
        starts = zip(positions, (0, *self._ends), strict=False)
        return np.concatenate([one + start for one, start in starts])


class BlendedDataset(RoutingDataset):
    """A blend: samples of several datasets, in the order of a schedule.

    In a resumed run whose blend has changed, positions before the change cannot be read.

    Args:
        datasets: The sources.
        order: Order of the blend, which begins at `first_sample`.
        first_sample: First position of the blend in the run.
        source_starts: Samples that each source gave before it; None for none.

    Raises:
        ValueError: If a dataset has fewer samples than the order takes from it.
    """

    def __init__(
        self,
        datasets: Sequence[TokenDataset],
        order: BlendOrder,
        first_sample: int = 0,
        source_starts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(datasets)
        self._order = order
        self._first = first_sample
        self._starts = tuple(source_starts or [0] * len(datasets))
        ends = np.add(self._starts, order.counts_at(len(order))).tolist()
        for index, (dataset, end) in enumerate(zip(datasets, ends, strict=True)):
            if len(dataset) < end:
                raise ValueError(
                    f"source {index} has {len(dataset)} samples, but the blend needs {end}"
                )

    def __len__(self) -> int:
        return self._first + len(self._order)

    def _locate(self, position: int) -> tuple[int, int]:
        if not self._first <= position < len(self):
            raise IndexError(
                f"sample {position} of a blend of the samples {self._first} to {len(self)}"
            )
        source, sample = self._order.locate(position - self._first)
        return source, self._starts[source] + sample

    def positions_of(self, prefix: str, sequences: IntArray) -> IntArray:
        ends = range(1, len(self._order) + 1)
        positions = list[int]()
        for index, (dataset, start) in enumerate(zip(self._datasets, self._starts, strict=True)):
            samples = dataset.positions_of(prefix, sequences) - start
            counts = functools.partial(self._count, index)
            at = (bisect.bisect(ends, one, key=counts) for one in samples[samples >= 0].tolist())
            positions += (self._first + one for one in at if one < len(ends))
        return np.array(sorted(positions), dtype=np.int64)

    def _count(self, index: int, end: int) -> int:
        return int(self._order.counts_at(end)[index])
