"""Datasets of resumed runs, which continue after a change of the blend or an exhausted index.

Knows datasets, orders and counts, but not how they are made.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ds.data.blended_dataset import BlendOrder, RoutingDataset
from megatron_ds.data.gpt_dataset import TokenDataset


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


class ConcatDataset(RoutingDataset):
    """Concatenation of the datasets of one source."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        super().__init__(datasets)
        self._ends = list(itertools.accumulate(len(each) for each in datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def sample_id(self, position: int) -> str:
        number, local = self._locate(position)
        suffix = f"+{number}" if number else ""
        return f"{self._datasets[number].sample_id(local)}{suffix}"

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a dataset of {len(self)}")
        number = bisect.bisect_right(self._ends, position)
        return number, position - (self._ends[number - 1] if number else 0)


class ResumedBlendDataset(RoutingDataset):
    """Samples of a run after a change of its blend; earlier positions cannot be read.

    Args:
        datasets: The sources of the current blend.
        order: Order of the current blend, which begins at `first_sample`.
        first_sample: First position of the current blend in the run.
        source_starts: Samples that each source gave before it.

    Raises:
        ValueError: If a dataset has fewer samples than are needed.
    """

    def __init__(
        self,
        datasets: Sequence[TokenDataset],
        order: BlendOrder,
        first_sample: int,
        source_starts: Sequence[int],
    ) -> None:
        needed = order.counts_at(len(order)).tolist()
        for number, (dataset, start, count) in enumerate(
            zip(datasets, source_starts, needed, strict=True)
        ):
            if len(dataset) < start + count:
                raise ValueError(
                    f"source {number} has {len(dataset)} samples, but the blend needs {start} to "
                    f"{start + count}"
                )
        super().__init__(datasets)
        self._order = order
        self._first = first_sample
        self._starts = tuple(source_starts)

    def __len__(self) -> int:
        return self._first + len(self._order)

    def _locate(self, position: int) -> tuple[int, int]:
        if not self._first <= position < len(self):
            raise IndexError(
                f"sample {position} of a blend of the samples {self._first} to {len(self)}"
            )
        source, sample = self._order.locate(position - self._first)
        return source, self._starts[source] + sample
