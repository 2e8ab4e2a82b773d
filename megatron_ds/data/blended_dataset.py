"""Datasets that take their samples from several others: blends and concatenations.

Knows datasets and the order of a blend, but not how either is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.gpt_dataset import SampleArray, TokenDataset


class BlendOrder(Protocol):
    """Maps each position of a blend to a source and one of its samples."""

    def __len__(self) -> int: ...

    def locate(self, position: int) -> tuple[int, int]:
        """Index of the source and of its sample at a position, 0 <= position < len."""

    def counts_at(self, end: int) -> npt.NDArray[np.int64]:
        """Samples of each source within the first `end` positions, [number of sources]."""


class RoutingDataset:
    """Reads each sample from one of several datasets of equal seq_length and vocab_size."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        self._datasets = tuple(datasets)
        self.seq_length = datasets[0].seq_length
        self.vocab_size = datasets[0].vocab_size

    def __getitem__(self, position: int) -> SampleArray:
        number, sample = self._locate(position)
        return self._datasets[number][sample]

    def read_into(self, position: int, row: SampleArray) -> None:
        number, sample = self._locate(position)
        self._datasets[number].read_into(sample, row)

    def sample_id(self, position: int) -> str:
        number, sample = self._locate(position)
        return f"{number}/{self._datasets[number].sample_id(sample)}"

    def _locate(self, position: int) -> tuple[int, int]:
        """Index of the dataset and of its sample.

        Raises:
            IndexError: If there is no such position.
        """
        raise NotImplementedError


class BlendedDataset(RoutingDataset):
    """A blend: samples of several datasets, in the order of a schedule.

    Raises:
        ValueError: If a dataset has fewer samples than the order takes from it.
    """

    def __init__(self, datasets: Sequence[TokenDataset], order: BlendOrder) -> None:
        needed = order.counts_at(len(order)).tolist()
        short = [
            f"source {number} has {len(dataset)} samples, but the blend needs {count}"
            for number, (dataset, count) in enumerate(zip(datasets, needed, strict=True))
            if len(dataset) < count
        ]
        if short:
            raise ValueError("; ".join(short))
        super().__init__(datasets)
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a blend of {len(self)}")
        return self._order.locate(position)
