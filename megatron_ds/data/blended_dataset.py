"""Samples of several datasets, mixed by weight in a fixed order.

Knows the mixing order and its sources; not how either was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.gpt_dataset import SampleArray, TokenDataset


class BlendOrder(Protocol):
    """Which source gives each sample of a mixture, and which of its samples that is."""

    def __len__(self) -> int: ...

    def locate(self, position: int) -> tuple[int, int]:
        """Source and number of its sample at a position, 0 <= position < len."""

    def counts_at(self, end: int) -> npt.NDArray[np.int64]:
        """[number of sources]: how many samples each gives to the first `end` positions."""


class _RoutingDataset:
    """Samples that are read from one of several datasets of the same length and vocabulary."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        self._datasets = tuple(datasets)
        self.seq_length = datasets[0].seq_length
        self.vocab_size = datasets[0].vocab_size

    def __getitem__(self, position: int) -> SampleArray:
        number, sample = self._find(position)
        return self._datasets[number][sample]

    def read_into(self, position: int, row: SampleArray) -> None:
        number, sample = self._find(position)
        self._datasets[number].read_into(sample, row)

    def sample_id(self, position: int) -> str:
        number, sample = self._find(position)
        return f"{number}/{self._datasets[number].sample_id(sample)}"

    def _find(self, position: int) -> tuple[int, int]:
        """Number of the dataset and of its sample. Raises IndexError for no position."""
        raise NotImplementedError


class BlendedDataset(_RoutingDataset):
    """Position i is the sample of the source that `order` names.

    Raises ValueError if a dataset holds fewer samples than the order takes from it.
    """

    def __init__(self, datasets: Sequence[TokenDataset], order: BlendOrder) -> None:
        taken = order.counts_at(len(order)).tolist()
        short = [
            f"source {number} has {len(dataset)} samples, the blend takes {count}"
            for number, (dataset, count) in enumerate(zip(datasets, taken, strict=True))
            if len(dataset) < count
        ]
        if short:
            raise ValueError("; ".join(short))
        super().__init__(datasets)
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def _find(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a blend of {len(self)}")
        return self._order.locate(position)
