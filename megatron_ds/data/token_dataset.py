"""Samples by their position in the data order: what a dataset of a run can do, and its reading.

Knows no files, indexes, ranks or torch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron_ds.data.remote.token_cache import Item, TokenCache
from megatron_ds.data.sample import NO_MARKS, IdArray, Mark, MarkArray, Samples, Transform
from megatron_ds.data.sample_index import IntArray


class Piece(NamedTuple):
    """Consecutive tokens of a sequence of a token file, at least one."""

    prefix: str
    """The token file."""
    sequence: int
    first: int
    """Position of the first of the tokens in the sequence."""
    size: int

    def cut(self, start: int, end: int) -> Piece:
        """Tokens `start` to `end` (exclusive) of the piece; the size is negative outside of it."""
        first = max(start, 0)
        return self._replace(first=self.first + first, size=min(end, self.size) - first)


class TokenDataset(Protocol):
    """Samples by position in the data order."""

    seq_length: int
    vocab_size: int | None
    """Exclusive upper bound of the token ids; None if unknown."""
    cache: TokenCache | None
    """Through which samples are read, by `SampleReading`, if their files have URLs."""
    marks: Mark = NO_MARKS
    """The marks that tokens may have, for which `SampleReading` reads marks."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> IdArray:
        """Token ids of a sample, [seq_length + 1].

        Raises:
            UserError: If a token id is not below `vocab_size`.
        """

    def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        """Reads a sample, unchecked.

        Args:
            position: Position of the sample.
            ids: [seq_length + 1], for its token ids.
            marks: [seq_length + 1], zeros, for the marks that the dataset knows; None: not needed.
        """

    def sample_id(self, position: int) -> str:
        """A name of the sample that does not depend on its position in the data order."""

    def pieces(self, position: int) -> Iterator[Piece]:
        """Where the tokens of a sample come from, in their order; nothing if not from files."""
        return iter(())

    def positions_of(self, prefix: str, sequences: IntArray) -> IntArray:
        """Positions of all samples that have tokens of some sequences of a token file."""
        return np.empty(0, dtype=np.int64)


class SampleReading:
    """Reads samples; some may have to be downloaded first.

    Args:
        dataset: The samples.
        positions: Positions of the samples.
        samples: Memory for them, [len(positions), seq_length + 1], with marks if the dataset has
            them. None: new memory.
    """

    def __init__(
        self, dataset: TokenDataset, positions: Sequence[int], samples: Samples | None = None
    ) -> None:
        if samples is None:
            samples = Samples.empty((len(positions), dataset.seq_length + 1), dataset.marks)
        self.samples = samples
        self._dataset = dataset
        self._positions = positions
        self._rest: list[Item] = []
        ids, marks = samples
        if marks is not None:
            marks.fill(0)
        if dataset.cache is not None:
            rows = (ids,) if marks is None else (ids, marks)
            items: list[Item] = list(zip(positions, *rows, strict=True))
            self._rest = dataset.cache.read_present(items, dataset.read_into)
            return
        read_into = dataset.read_into
        if marks is None:
            for position, row in zip(positions, ids, strict=True):
                read_into(position, row)
        else:
            for position, row, row_marks in zip(positions, ids, marks, strict=True):
                read_into(position, row, row_marks)

    @property
    def is_complete(self) -> bool:
        """Whether no sample is missing."""
        return not self._rest

    def finish(self) -> Samples:
        """The samples, when all are read.

        Token ids are checked for all samples at once: a numpy call takes about as long for one
        sample as for ten.

        Raises:
            UserError: If a token id is not below the dataset's `vocab_size`, or a download fails.
        """
        dataset = self._dataset
        if self._rest and dataset.cache is not None:
            dataset.cache.read(self._rest, dataset.read_into)
        if dataset.vocab_size is not None and not all_below(dataset.vocab_size, self.samples.ids):
            for position in self._positions:
                dataset[position]  # raises the error, which names token and file
        if isinstance(dataset, TransformedDataset):
            dataset.transform(self._positions, self.samples)
        return self.samples


class TransformedDataset:
    """The samples of another dataset, transformed once they are complete and checked.

    Implements `TokenDataset`, but `read_into` reads the sample as it was.

    Args:
        dataset: The other dataset.
        transforms: Change its samples, one after the other.
    """

    def __init__(self, dataset: TokenDataset, transforms: Sequence[Transform]) -> None:
        self._dataset = dataset
        self._transforms = tuple(transforms)
        self.marks = functools.reduce(operator.or_, (t.marks for t in transforms), dataset.marks)
        self.seq_length = dataset.seq_length
        self.vocab_size = dataset.vocab_size
        self.cache = dataset.cache
        self.read_into = dataset.read_into
        self.sample_id = dataset.sample_id
        self.pieces = dataset.pieces
        self.positions_of = dataset.positions_of

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, position: int) -> IdArray:
        ids = self._dataset[position]
        self.transform([position], Samples(ids[None], np.zeros((1, len(ids)), dtype=np.uint8)))
        return ids

    def transform(self, positions: Sequence[int], samples: Samples) -> None:
        """Transforms the samples of some positions in place."""
        for transform in self._transforms:
            transform(positions, samples)


def all_below(limit: int, tokens: IdArray) -> bool:
    """Whether all tokens are in [0, limit): as unsigned numbers, negative ones are huge."""
    return int(np.maximum.reduce(tokens.view(np.uint32), axis=None)) < limit
