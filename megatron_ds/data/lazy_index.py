"""Sample indexes of one token file, built or loaded on first use.

Building the indexes of a blend of thousands of files at start-up would take too long; the number of
samples is known without them. Knows the index arithmetic and the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.data.index_cache import ArrayCache, Arrays
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.data.sample_index import SampleIndexes, build_indexes, index_bytes, total_samples


@dataclass(frozen=True)
class LazySampleIndexes:
    """Indexes of at least `samples` samples, rounded up to complete epochs.

    Attributes:
        file: The token file.
        split: Name of the split, for messages and file names.
        document_range: First document and end.
        tokens: Tokens of these documents, at least one.
        samples: Requested samples.
        seq_length: Tokens per sample, without the last label.
        seed: Seed of the shuffles.
        cache_key: Everything that determines the indexes.
        cache: Where they are stored.
    """

    file: IndexedDataset
    split: str
    document_range: tuple[int, int]
    tokens: int
    samples: int
    seq_length: int
    seed: int
    cache_key: Mapping[str, Any]
    cache: ArrayCache

    def __post_init__(self) -> None:
        if total_samples(self.samples, self.tokens, self.seq_length) > sys.maxsize:
            raise self._too_large("an array has at most 2^63 - 1 elements")

    def __len__(self) -> int:
        return total_samples(self.samples, self.tokens, self.seq_length)

    def load(self) -> SampleIndexes:
        """Loads the indexes from the cache, or builds and stores them.

        Raises:
            UserError: If they cannot be built or stored.
        """
        arrays = self.cache.get_or_build(self._kind, self.cache_key, self._build)
        return SampleIndexes(arrays["documents"], arrays["samples"], arrays["shuffle"])

    def missing_bytes(self) -> int:
        """Bytes that the cache needs for them; 0 if they are stored."""
        if self.cache.contains(self._kind, self.cache_key):
            return 0
        documents = self.document_range[1] - self.document_range[0]
        return index_bytes(self.samples, documents, self.tokens, self.seq_length)

    @property
    def _kind(self) -> str:
        return f"{Path(self.file.prefix).name}-{self.split}"

    def _build(self) -> Arrays:
        documents = np.arange(*self.document_range)
        try:
            made = build_indexes(
                self.file.lengths, documents, self.samples, self.seq_length, self.seed
            )
        except (MemoryError, OverflowError, ValueError) as error:
            raise self._too_large(str(error)) from error
        return {"documents": made.documents, "samples": made.samples, "shuffle": made.shuffle}

    def _too_large(self, reason: str) -> UserError:
        return user_error(
            "index-too-large",
            prefix=self.file.prefix,
            samples=self.samples,
            split=self.split,
            reason=reason,
        )
