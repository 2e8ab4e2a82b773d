"""The indexes of a part of one token file: described at once, made and loaded when needed.

A file's index takes time and room that a mixture of thousands cannot spend at its start; how many
samples it will hold is known without it. Knows the index arithmetic and the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.data.index_cache import ArrayCache, Arrays
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.data.sample_index import SampleIndexes, build_indexes, index_bytes, total_samples


@dataclass(frozen=True)
class CachedIndexes:
    """The indexes that give at least `samples` samples, and all of their epochs.

    bounds: first and one-past-last document; tokens: of these, at least one. decides: all that
    decides the indexes, for the name in the cache.
    """

    file: IndexedDataset
    part: str
    bounds: tuple[int, int]
    tokens: int
    samples: int
    seq_length: int
    seed: int
    cache_key: Mapping[str, Any]
    cache: ArrayCache

    def __post_init__(self) -> None:
        """Raises ValueError for more samples than an array can have."""
        if total_samples(self.samples, self.tokens, self.seq_length) > sys.maxsize:
            raise self._too_many("an array has at most 2^63 - 1 elements")

    def __len__(self) -> int:
        return total_samples(self.samples, self.tokens, self.seq_length)

    def load(self) -> SampleIndexes:
        """Raises ValueError if they can neither be found nor be made and kept."""
        arrays = self.cache.get_or_build(self._kind, self.cache_key, self._make)
        return SampleIndexes(arrays["documents"], arrays["samples"], arrays["shuffle"])

    def missing_bytes(self) -> int:
        """Room that the cache needs for them; 0 if they are there."""
        if self.cache.contains(self._kind, self.cache_key):
            return 0
        documents = self.bounds[1] - self.bounds[0]
        return index_bytes(self.samples, documents, self.tokens, self.seq_length)

    @property
    def _kind(self) -> str:
        return f"{Path(self.file.prefix).name}-{self.part}"

    def _make(self) -> Arrays:
        documents = np.arange(*self.bounds)
        try:
            made = build_indexes(
                self.file.lengths, documents, self.samples, self.seq_length, self.seed
            )
        except (MemoryError, OverflowError, ValueError) as error:
            raise self._too_many(str(error)) from error
        return {"documents": made.documents, "samples": made.samples, "shuffle": made.shuffle}

    def _too_many(self, why: str) -> ValueError:
        return ValueError(
            f"{self.file.prefix}: {self.samples} {self.part} samples need an index that cannot be "
            f"made ({why}): ask for fewer samples"
        )
