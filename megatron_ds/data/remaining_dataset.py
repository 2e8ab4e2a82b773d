"""Samples of another length, from the text of a dataset that was not read.

For a run whose sequence length changes in the middle of an epoch. Knows datasets and arrays, but no
files, caches, ranks or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megatron_ds.data.gpt_dataset import NumberedDataset, SampleArray
from megatron_ds.data.sample_index import IntArray, shuffle_dtype


@dataclass(frozen=True)
class RemainingIndexes:
    """The arrays of a `RemainingDataset`.

    Attributes:
        unread: Numbers of the samples that were not read, in the order of the text.
        shuffle: [S], sample number of each position in the data order.
    """

    unread: IntArray
    shuffle: IntArray


class RemainingIndexProvider(Protocol):
    """Gives the indexes of a `RemainingDataset` when they are needed."""

    def __len__(self) -> int:
        """Number of samples."""

    def load(self) -> RemainingIndexes:
        """Loads or builds the indexes."""


def remaining_samples(dataset: NumberedDataset, read: int, seq_length: int) -> int:
    """Number of samples of a length after the first `read` positions of a dataset."""
    return (len(dataset) - read) * dataset.seq_length // seq_length


def build_remaining_indexes(
    dataset: NumberedDataset, read: int, seq_length: int, seed: int
) -> RemainingIndexes:
    """Builds the indexes of the samples after the first `read` positions of a dataset.

    Args:
        dataset: The dataset.
        read: Positions that were read.
        seq_length: Tokens per new sample, without the last label.
        seed: Seed of the shuffle.
    """
    total = remaining_samples(dataset, read, seq_length)
    shuffle: IntArray = np.arange(total, dtype=shuffle_dtype(total))
    np.random.RandomState(seed).shuffle(shuffle)
    return RemainingIndexes(np.sort(dataset.shuffle()[read:]), shuffle)


class RemainingDataset(NumberedDataset):
    """The samples after the first positions of a dataset, [seq_length + 1] int32 each.

    The unread samples are joined in the order of the text, and split again. Where a sample between
    two of them was read, the text continues after a gap. Fewer tokens than a new sample has remain
    at the end.

    Args:
        dataset: The dataset.
        indexes: Its unread samples and the new order, loaded when the first sample is read.
        seq_length: Tokens per sample, without the last label.
    """

    def __init__(
        self, dataset: NumberedDataset, indexes: RemainingIndexProvider, seq_length: int
    ) -> None:
        self.seq_length = seq_length
        self.vocab_size = dataset.vocab_size
        self._dataset = dataset
        self.indexes = indexes
        self._loaded: RemainingIndexes | None = None

    def __len__(self) -> int:
        return len(self.indexes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    def read_numbered(self, sample: int, row: SampleArray) -> None:
        unread, length = self.open().unread, self._dataset.seq_length
        piece = np.empty(length + 1, dtype=np.int32)
        first, filled = sample * self.seq_length, 0
        while filled < self.seq_length:
            number, offset = divmod(first + filled, length)
            self._dataset.read_numbered(int(unread[number]), piece)
            size = min(length - offset, self.seq_length - filled)
            # Together with the label of the last token, which the next piece replaces.
            row[filled : filled + size + 1] = piece[offset : offset + size + 1]
            filled += size

    def sample_id(self, position: int) -> str:
        file, _, _ = self._dataset.sample_id(0).rpartition(":")
        return f"{file}:unread-{self.seq_length}-{self._sample(position)}"

    def shuffle(self) -> IntArray:
        return self.open().shuffle

    def _source(self, position: int) -> str:
        return self.sample_id(position)

    def open(self) -> RemainingIndexes:
        """Loads the indexes now, instead of when the first sample is read."""
        if self._loaded is None:
            self._loaded = self.indexes.load()
        return self._loaded

    def _sample(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a dataset of {len(self)}")
        return int(self.open().shuffle[position])
