"""Samples of several datasets, mixed by weight in a fixed order.

Knows the mixing order and its sources; not how either was made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.gpt_dataset import TokenDataset
from megatron_ds.data.sample_index import IntArray


class BlendOrder(Protocol):
    """Which source gives each sample of a mixture, and which of its samples that is."""

    def __len__(self) -> int: ...

    def find(self, position: int) -> tuple[int, int]:
        """Source and number of its sample at a position, 0 <= position < len."""

    def taken(self, end: int) -> npt.NDArray[np.int64]:
        """[number of sources]: how many samples each gives to the first `end` positions."""


class StoredOrder:
    """Position i is sample `sample[i]` of source `source[i]`.

    source, sample: [number of samples], from `sample_index.blend`. sources: their number.
    """

    def __init__(self, source: IntArray, sample: IntArray, sources: int) -> None:
        self._source = source
        self._sample = sample
        self._sources = sources

    def __len__(self) -> int:
        return len(self._source)

    def find(self, position: int) -> tuple[int, int]:
        return int(self._source[position]), int(self._sample[position])

    def taken(self, end: int) -> npt.NDArray[np.int64]:
        return np.bincount(self._source[:end], minlength=self._sources)


class BlendedDataset:
    """Position i is the sample of the source that `order` names.

    Raises ValueError if a dataset holds fewer samples than the order takes from it.
    """

    def __init__(self, datasets: Sequence[TokenDataset], order: BlendOrder) -> None:
        taken = order.taken(len(order)).tolist()
        short = [
            f"source {number} has {len(dataset)} samples, the blend takes {count}"
            for number, (dataset, count) in enumerate(zip(datasets, taken, strict=True))
            if len(dataset) < count
        ]
        if short:
            raise ValueError("; ".join(short))
        self._datasets = tuple(datasets)
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
        source, sample = self._find(position)
        return self._datasets[source][sample]

    def sample_id(self, position: int) -> str:
        source, sample = self._find(position)
        return f"{source}/{self._datasets[source].sample_id(sample)}"

    def _find(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a blend of {len(self)}")
        return self._order.find(position)
