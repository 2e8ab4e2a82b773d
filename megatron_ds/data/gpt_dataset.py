"""Samples of one token file: sample i is seq_length + 1 tokens that run across documents.

Knows the token file and its indexes; not splits, caches, ranks or torch.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed import IndexedDataset
from megatron_ds.data.sample_index import SampleIndexes


class TokenDataset(Protocol):
    """Samples by position in the data order."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
        """Tokens [seq_length + 1]."""

    def sample_id(self, position: int) -> str:
        """A name of the sample that does not depend on how the data order is read."""


class GPTDataset:
    """The samples that `indexes` cut out of a token file, each [seq_length + 1] int64.

    A sample with a token that is not below vocab_size is a ValueError: the file is damaged or of
    another tokenizer.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        indexes: SampleIndexes,
        seq_length: int,
        vocab_size: int | None = None,
    ) -> None:
        self.seq_length = seq_length
        self._vocab_size = vocab_size
        self._file = tokens
        self._indexes = indexes

    def __len__(self) -> int:
        return len(self._indexes.shuffle)

    def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
        sample = self._sample(position)
        starts, documents, file = self._indexes.samples, self._indexes.documents, self._file
        at, offset = starts[sample].tolist()
        tokens_S = np.empty(self.seq_length + 1, dtype=np.int64)
        filled, wanted = 0, self.seq_length + 1
        item = file.dtype.itemsize
        while filled < wanted:
            sequence = documents[at]
            size = min(int(file.lengths[sequence]) - offset, wanted - filled)
            begin = int(file.pointers[sequence]) // item + offset
            tokens_S[filled : filled + size] = file.tokens[begin : begin + size]
            filled += size
            at, offset = at + 1, 0
        self._check(tokens_S, sample)
        return tokens_S

    def sample_id(self, position: int) -> str:
        return f"{os.path.basename(self._file.prefix)}:{self._sample(position)}"

    def _check(self, tokens_S: npt.NDArray[np.int64], sample: int) -> None:
        if self._vocab_size is None:
            return
        low, high = int(tokens_S.min()), int(tokens_S.max())
        if low < 0 or high >= self._vocab_size:
            raise ValueError(
                f"{self._file.prefix}.bin: sample {sample} has the token "
                f"{low if low < 0 else high}, which a vocabulary of {self._vocab_size} has not: "
                "the file is damaged, or made with another tokenizer"
            )

    def _sample(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of a dataset of {len(self)}")
        return int(self._indexes.shuffle[position])
