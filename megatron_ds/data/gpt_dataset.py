"""Samples of one token file: sample i is seq_length + 1 tokens that run across documents.

Knows the token file and its indexes; not splits, caches, ranks or torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed_dataset import IndexedDataset, Tokens
from megatron_ds.data.sample_index import IntArray, SampleIndexes

SampleArray = npt.NDArray[np.int64]


class TokenDataset(Protocol):
    """Samples by position in the data order."""

    @property
    def seq_length(self) -> int: ...

    @property
    def vocab_size(self) -> int | None:
        """Tokens are to be below it; None: nothing is known of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> SampleArray:
        """Tokens [seq_length + 1]. Raises ValueError for a token that is not below vocab_size."""

    def read_into(self, position: int, row: SampleArray) -> None:
        """Writes the sample's tokens into row [seq_length + 1] and does not look at them."""

    def sample_id(self, position: int) -> str:
        """A name of the sample that does not depend on how the data order is read."""


def read_samples(dataset: TokenDataset, positions: Sequence[int]) -> SampleArray:
    """The samples of these positions [positions, seq_length + 1].

    All are held against the vocabulary at once: numpy takes about as long for one sample as for
    ten. Raises ValueError for a token that is not below the dataset's vocab_size.
    """
    rows = np.empty((len(positions), dataset.seq_length + 1), dtype=np.int64)
    for position, row in zip(positions, rows, strict=True):
        dataset.read_into(position, row)
    if dataset.vocab_size is not None and not _all_below(dataset.vocab_size, rows):
        for position in positions:
            dataset[position]  # says which token of which file it is
    return rows


class SampleIndexProvider(Protocol):
    """The indexes of a dataset, wherever they are: `SampleIndexes` are their own."""

    def __len__(self) -> int:
        """Number of samples."""

    def load(self) -> SampleIndexes: ...


class GPTDataset:
    """The samples that the indexes cut out of a token file, each [seq_length + 1] int64.

    indexes: loaded when the first sample is read.
    A sample with a token that is not below vocab_size is a ValueError: the file is damaged or of
    another tokenizer.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        indexes: SampleIndexProvider,
        seq_length: int,
        vocab_size: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self._file = tokens
        self._indexes = indexes
        self._size = len(indexes)
        self._views: _FastViews | None = None

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None}

    def __getitem__(self, position: int) -> SampleArray:
        row = np.empty(self.seq_length + 1, dtype=np.int64)
        self.read_into(position, row)
        if self.vocab_size is not None and not _all_below(self.vocab_size, row):
            token = next(one for one in row.tolist() if not 0 <= one < self.vocab_size)
            raise ValueError(
                f"{self._file.prefix}.bin: sample {self._sample(position)} has the token {token}, "
                f"which a vocabulary of {self.vocab_size} has not: the file is damaged, or made "
                "with another tokenizer"
            )
        return row

    def read_into(self, position: int, row: SampleArray) -> None:
        sample = self._sample(position)
        _, documents, starts, lengths, pointers, tokens, item = self._views or self.open()
        at, offset = starts[2 * sample], starts[2 * sample + 1]
        filled, wanted = 0, self.seq_length + 1
        while filled < wanted:
            sequence = documents[at]
            begin = pointers[sequence] // item + offset
            size = min(lengths[sequence] - offset, wanted - filled)
            row[filled : filled + size] = tokens[begin : begin + size]
            filled += size
            at, offset = at + 1, 0

    def sample_id(self, position: int) -> str:
        return f"{os.path.basename(self._file.prefix)}:{self._sample(position)}"

    def open(self) -> _FastViews:
        """Gets the indexes, if that has not been done: what is wrong with them is told now."""
        if self._views is None:
            indexes, file = self._indexes.load(), self._file
            self._views = _FastViews(
                _view(indexes.shuffle),
                _view(indexes.documents),
                _view(indexes.samples),
                _view(file.lengths),
                _view(file.pointers),
                file.tokens,
                file.dtype.itemsize,
            )
        return self._views

    def _sample(self, position: int) -> int:
        if not 0 <= position < self._size:
            raise IndexError(f"sample {position} of a dataset of {self._size}")
        sample: int = (self._views or self.open()).shuffle[position]
        return sample


class _FastViews(NamedTuple):
    """A file and its indexes for reading one number at a time, several times faster than arrays."""

    shuffle: memoryview
    documents: memoryview
    starts: memoryview
    """Position in the documents and offset of sample i at 2 i and 2 i + 1."""
    lengths: memoryview
    pointers: memoryview
    tokens: Tokens
    item: int


def _view(array: IntArray) -> memoryview:
    """The numbers of an array, one after the other, whether its memory is aligned or not."""
    if not array.size:
        return memoryview(b"")
    return memoryview(array.reshape(-1).view(np.uint8)).cast(array.dtype.char)  # type: ignore


def _all_below(limit: int, tokens: SampleArray) -> bool:
    """Whether all tokens are from 0 to limit - 1: seen as unsigned, negative ones are huge."""
    return int(np.maximum.reduce(tokens.view(np.uint64), axis=None)) < limit
