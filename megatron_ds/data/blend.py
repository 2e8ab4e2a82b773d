"""Samples of several datasets, mixed by weight in a fixed order.

Knows the mixing order and its sources; not how either was made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ds.data.gpt_dataset import TokenDataset
from megatron_ds.data.sample_index import IntArray


class BlendedDataset:
    """Position i is sample `sample[i]` of dataset `source[i]`.

    source, sample: [number of samples], from `sample_index.blend`. Raises ValueError if a dataset
    holds fewer samples than the order takes from it.
    """

    def __init__(
        self, datasets: Sequence[TokenDataset], source: IntArray, sample: IntArray
    ) -> None:
        taken = np.bincount(source, minlength=len(datasets))
        short = [
            f"source {number} has {len(dataset)} samples, the blend takes {count}"
            for number, (dataset, count) in enumerate(zip(datasets, taken, strict=True))
            if len(dataset) < count
        ]
        if short:
            raise ValueError("; ".join(short))
        self._datasets = tuple(datasets)
        self._source = source
        self._sample = sample

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
        source, sample = self._find(position)
        return self._datasets[source][sample]

    def sample_id(self, position: int) -> str:
        source, sample = self._find(position)
        return f"{source}/{self._datasets[source].sample_id(sample)}"

    def _find(self, position: int) -> tuple[int, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a blend of {len(self)}")
        return int(self._source[position]), int(self._sample[position])
