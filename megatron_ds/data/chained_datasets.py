"""Training samples that go on where another mixture, or another index of a file, has ended.

Knows datasets, orders and counts; not how either was made.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ds.data.blended_dataset import BlendOrder, _RoutingDataset
from megatron_ds.data.gpt_dataset import TokenDataset


class SingleSourceOrder:
    """The order of a mixture of one."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def locate(self, position: int) -> tuple[int, int]:
        return 0, position

    def counts_at(self, end: int) -> npt.NDArray[np.int64]:
        return np.array([end], dtype=np.int64)


class ConcatDataset(_RoutingDataset):
    """The samples of several datasets of one source, one dataset after the other."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        super().__init__(datasets)
        self._ends = list(itertools.accumulate(len(each) for each in datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def sample_id(self, position: int) -> str:
        number, local = self._find(position)
        again = f"+{number}" if number else ""
        return f"{self._datasets[number].sample_id(local)}{again}"

    def _find(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a dataset of {len(self)}")
        number = bisect.bisect_right(self._ends, position)
        return number, position - (self._ends[number - 1] if number else 0)


class ResumedBlendDataset(_RoutingDataset):
    """The samples of a run from position `first` on, where its present mixture begins.

    Position first + i is that which `order` names at i; a source's sample k is its `starts` + k-th.
    What came before `first` is another mixture's. Raises ValueError if a dataset holds fewer
    samples than are taken from it.
    """

    def __init__(
        self, datasets: Sequence[TokenDataset], order: BlendOrder, first: int, starts: Sequence[int]
    ) -> None:
        taken = order.counts_at(len(order)).tolist()
        for number, (dataset, start, count) in enumerate(zip(datasets, starts, taken, strict=True)):
            if len(dataset) < start + count:
                raise ValueError(
                    f"source {number} has {len(dataset)} samples, the mixture takes those from "
                    f"{start} to {start + count}"
                )
        super().__init__(datasets)
        self._order = order
        self._first = first
        self._starts = tuple(starts)

    def __len__(self) -> int:
        return self._first + len(self._order)

    def _find(self, position: int) -> tuple[int, int]:
        if not self._first <= position < len(self):
            raise IndexError(
                f"sample {position} of a mixture that gives those from {self._first} to {len(self)}"
            )
        source, sample = self._order.locate(position - self._first)
        return source, self._starts[source] + sample
