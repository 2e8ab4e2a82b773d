"""Samples of another length, from the text of a dataset that was not read.

For a run whose sequence length changes in the middle of an epoch. Knows datasets and arrays, but no
files, caches, ranks or torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_ds.data.gpt_dataset import IndexProvider, NumberedDataset, SampleArray, view
from megatron_ds.data.sample_index import IntArray


@dataclass(frozen=True)
class RemainingIndexes:
    """The arrays of a `RemainingDataset`.

    Attributes:
        unread: Numbers of the samples that were not read, in the order of the text.
        shuffle: [S], sample number of each position in the data order.
    """

    unread: IntArray
    shuffle: IntArray


class RemainingDataset(NumberedDataset):
    """The samples after the first positions of a dataset, [seq_length + 1] int32 each.

    The unread samples are joined in the order of the text, and split again. Where a sample between
    two of them was read, the text continues after a gap. Fewer tokens than a new sample has remain
    at the end.

    Args:
        dataset: The dataset.
        indexes: Its unread samples and the new order, `RemainingIndexes` when they are loaded.
        seq_length: Tokens per sample, without the last label.
    """

    def __init__(self, dataset: NumberedDataset, indexes: IndexProvider, seq_length: int) -> None:
        super().__init__(dataset.prefix, indexes, seq_length, dataset.vocab_size)
        self._dataset = dataset

    def read_numbered(self, sample: int, row: SampleArray) -> None:
        _, unread = self.open()
        length = self._dataset.seq_length
        piece = np.empty(length + 1, dtype=np.int32)
        first, filled = sample * self.seq_length, 0
        while filled < self.seq_length:
            number, offset = divmod(first + filled, length)
            self._dataset.read_numbered(unread[number], piece)
            size = min(length - offset, self.seq_length - filled)
            # Together with the label of the last token, which the next piece replaces.
            row[filled : filled + size + 1] = piece[offset : offset + size + 1]
            filled += size

    def sample_id(self, position: int) -> str:
        return f"{self.name}:unread-{self.seq_length}-{self._sample(position)}"

    def _load(self) -> tuple[memoryview, memoryview]:
        indexes: RemainingIndexes = self._indexes.load()
        return view(indexes.shuffle), view(indexes.unread)
