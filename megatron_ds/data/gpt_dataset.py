"""Samples of one token file: seq_length + 1 consecutive tokens, across document boundaries.

They follow its indexes or, if the sequence length of a run changes in the middle of an epoch, have
another length and come from the text that was not read.

Knows the token file and its indexes, but no splits, caches, ranks or torch.
"""

from __future__ import annotations

import bisect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import user_error
from megatron_ds.data.remote.block_cache import USED
from megatron_ds.data.remote.token_cache import Item, RemoteTokens, TokenCache
from megatron_ds.data.sample_index import IntArray, SampleIndexes
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset, Tokens

SampleArray = npt.NDArray[np.int32]
END_MARK = 1 << 30
"""Added to the id of a document's last token, if documents end where the .idx file ends them."""
MAX_TOKEN = int(np.iinfo(np.int32).max)
_FastViews = tuple[
    *tuple[memoryview, memoryview, memoryview, memoryview, memoryview],
    *tuple[Tokens, int, memoryview | None, int],
]
"""Memory views of a file and its indexes, whose elements are read faster than numpy's: shuffle
index, documents, sample starts (position in the documents and token offset of sample i at 2 i and
2 i + 1), lengths and pointers of the sequences; the tokens and their size in bytes; of a file by
URL the marks of its blocks and the shift from a token's number to its block's."""


class Piece(NamedTuple):
    """Consecutive tokens of a sequence of a token file, at least one."""

    prefix: str
    """The token file."""
    sequence: int
    first: int
    """Position of the first of the tokens in the sequence."""
    size: int

    def cut(self, start: int, end: int) -> Piece:
        """The tokens from position `start` on, to before `end`; of negative size if none."""
        first = max(start, 0)
        return self._replace(first=self.first + first, size=min(end, self.size) - first)


class TokenDataset(Protocol):
    """Samples by position in the data order."""

    seq_length: int
    vocab_size: int | None
    """Exclusive upper bound of the token ids; None if unknown."""
    cache: TokenCache | None
    """Through which samples are read, by `SampleReading`, if their files have URLs."""
    marks_ends: bool = False
    """Whether END_MARK is added to the last token of each document."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> SampleArray:
        """Tokens of a sample, [seq_length + 1].

        Raises:
            UserError: If a token id is not below `vocab_size`.
        """

    def read_into(self, position: int, row: SampleArray) -> None:
        """Copies the sample's tokens, unchecked, into `row` [seq_length + 1]."""

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
        rows: [len(positions), seq_length + 1], for their tokens.
    """

    def __init__(
        self, dataset: TokenDataset, positions: Sequence[int], rows: SampleArray | None = None
    ) -> None:
        if rows is None:
            rows = np.empty((len(positions), dataset.seq_length + 1), dtype=np.int32)
        self.rows = rows
        self._dataset, self._positions = dataset, positions
        self._rest: list[Item] = []
        if dataset.cache is None:
            for position, row in zip(positions, rows, strict=True):
                dataset.read_into(position, row)
        else:
            items = list(zip(positions, rows, strict=True))
            self._rest = dataset.cache.read_present(items, dataset.read_into)

    @property
    def is_complete(self) -> bool:
        """Whether no sample is missing."""
        return not self._rest

    def finish(self) -> SampleArray:
        """The samples, [len(positions), seq_length + 1], when all are read.

        Token ids are checked for all samples at once: a numpy call takes about as long for one
        sample as for ten.

        Raises:
            UserError: If a token id is not below the dataset's `vocab_size`, or a download fails.
        """
        dataset = self._dataset
        if self._rest and dataset.cache is not None:
            dataset.cache.read(self._rest, dataset.read_into)
        ids = self.rows & ~END_MARK if dataset.marks_ends else self.rows
        if dataset.vocab_size is not None and not _all_below(dataset.vocab_size, ids):
            for position in self._positions:
                dataset[position]  # raises the error, which names token and file
        if isinstance(dataset, TransformedDataset):
            for position, row in zip(self._positions, self.rows, strict=True):
                dataset.transform(position, row)
        return self.rows


class TransformedDataset:
    """The samples of another dataset, transformed once they are complete and checked.

    Implements `TokenDataset`, but `read_into` copies the sample as it was.

    Args:
        dataset: The other dataset.
        transform: Changes the sample of a position in place.
    """

    def __init__(
        self, dataset: TokenDataset, transform: Callable[[int, SampleArray], None]
    ) -> None:
        self._dataset, self.transform = dataset, transform
        self.seq_length, self.vocab_size = dataset.seq_length, dataset.vocab_size
        self.marks_ends, self.cache = dataset.marks_ends, dataset.cache
        self.read_into, self.sample_id = dataset.read_into, dataset.sample_id
        self.pieces, self.positions_of = dataset.pieces, dataset.positions_of

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, position: int) -> SampleArray:
        row = self._dataset[position]
        self.transform(position, row)
        return row


class IndexProvider(Protocol):
    """Gives the indexes of a dataset when they are needed."""

    def __len__(self) -> int:
        """Number of samples."""

    def load(self) -> Any:
        """Loads or builds the indexes."""


class NumberedDataset(TokenDataset, ABC):
    """Samples that follow each other in a text: sample n ends where n + 1 begins.

    Args:
        prefix: The token file of the text.
        cache: Through which its tokens are read if it has a URL.
        indexes: Loaded when the first sample is read.
        seq_length: Tokens per sample, without the last label.
        vocab_size: Exclusive upper bound of the token ids; None for no check.
    """

    def __init__(
        self,
        prefix: str,
        cache: TokenCache | None,
        indexes: IndexProvider,
        seq_length: int,
        vocab_size: int | None,
    ) -> None:
        self.prefix, self.name, self.cache = prefix, os.path.basename(prefix), cache
        self.seq_length, self.vocab_size = seq_length, vocab_size
        self._indexes = indexes
        self._size = len(indexes)
        self._views: Any = None

    @abstractmethod
    def read_numbered(self, sample: int, row: SampleArray) -> None:
        """Copies a sample's tokens, unchecked, into `row` [seq_length + 1]."""

    @abstractmethod
    def sample_id(self, position: int) -> str:
        """A name of the sample that does not depend on its position in the data order."""

    @abstractmethod
    def pieces_of(self, sample: int) -> Iterator[Piece]:
        """Where the tokens of a sample come from, in their order."""

    @abstractmethod
    def _near(self, sequences: IntArray) -> IntArray:
        """Numbers of samples, of which all others have no tokens of these sequences."""

    @abstractmethod
    def _load(self) -> Any:
        """Views of the indexes. The first is the number of the sample at each position."""

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None}

    def __getitem__(self, position: int) -> SampleArray:
        row = np.empty(self.seq_length + 1, dtype=np.int32)
        if self.cache is None:
            self.read_into(position, row)
        else:
            self.cache.read([(position, row)], self.read_into)
        ids = row & ~END_MARK if self.marks_ends else row
        if self.vocab_size is not None and not _all_below(self.vocab_size, ids):
            raise user_error(
                "sample-token-outside-vocabulary",
                prefix=self.prefix,
                sample=self._sample(position),
                token=next(token for token in ids.tolist() if not 0 <= token < self.vocab_size),
                vocab_size=self.vocab_size,
            )
        return row

    def read_into(self, position: int, row: SampleArray) -> None:
        self.read_numbered(self._sample(position), row)

    def pieces(self, position: int) -> Iterator[Piece]:
        return self.pieces_of(self._sample(position))

    def positions_of(self, prefix: str, sequences: IntArray) -> IntArray:
        if prefix != self.prefix:
            return super().positions_of(prefix, sequences)
        return np.flatnonzero(np.isin(np.asarray(self.open()[0]), self.samples_of(sequences)))

    def samples_of(self, sequences: IntArray) -> IntArray:
        """Numbers of the samples that have tokens of some sequences, sorted."""
        wanted = {*sequences.tolist()}
        samples = (
            sample
            for sample in self._near(sequences).tolist()
            if any(piece.sequence in wanted for piece in self.pieces_of(sample))
        )
        return np.fromiter(samples, dtype=np.int64)

    def open(self) -> Any:
        """Loads the indexes now, instead of when the first sample is read."""
        if self._views is None:
            self._views = self._load()
        return self._views

    def _sample(self, position: int) -> int:
        if not 0 <= position < self._size:
            raise IndexError(f"sample {position} of a dataset of {self._size}")
        sample: int = (self._views or self.open())[0][position]
        return sample


class GPTDataset(NumberedDataset):
    """Samples of a token file, each [seq_length + 1] int32.

    Args:
        tokens: The token file.
        indexes: Its indexes, `SampleIndexes` when they are loaded.
        seq_length: Tokens per sample, without the last label.
        vocab_size: Exclusive upper bound of the token ids; None for no check.
        marks_ends: Add END_MARK to the last token of each sequence.
    """

    def __init__(
        self,
        tokens: IndexedDataset,
        indexes: IndexProvider,
        seq_length: int,
        vocab_size: int | None = None,
        *,
        marks_ends: bool = False,
    ) -> None:
        super().__init__(tokens.prefix, tokens.cache, indexes, seq_length, vocab_size)
        self._file, self.marks_ends = tokens, marks_ends

    def read_numbered(self, sample: int, row: SampleArray) -> None:
        _, documents, starts, lengths, pointers, tokens, item, marks, shift = (
            self._views or self.open()
        )
        if marks is not None and marks[-1] == USED:
            marks = None  # no block is missing
        at, offset = starts[2 * sample], starts[2 * sample + 1]
        filled, wanted = 0, self.seq_length + 1
        while filled < wanted:
            sequence = documents[at]
            begin = pointers[sequence] // item + offset
            size = min(lengths[sequence] - offset, wanted - filled)
            if (
                marks is None
                or marks[begin >> shift] == USED == marks[(begin + size - 1) >> shift]
                or self._has(begin, size)
            ):
                part = tokens[begin : begin + size]
                # Truncated to 32 bits, an invalid 64-bit id might be valid.
                row[filled : filled + size] = part if item < 8 else np.clip(part, -1, MAX_TOKEN)
                if self.marks_ends and size:
                    piece = row[filled : filled + size]
                    np.minimum(piece, END_MARK - 1, out=piece)  # invalid ids stay so without a mark
                    piece[-1] |= END_MARK * (offset + size == lengths[sequence])
            filled += size
            at, offset = at + 1, 0

    def sample_id(self, position: int) -> str:
        return f"{self.name}:{self._sample(position)}"

    def pieces_of(self, sample: int) -> Iterator[Piece]:
        _, documents, starts, lengths, *_ = self.open()
        at, offset = starts[2 * sample], starts[2 * sample + 1]
        missing = self.seq_length + 1
        while missing:
            size = min(lengths[documents[at]] - offset, missing)
            if size:
                yield Piece(self.prefix, documents[at], offset, size)
            missing -= size
            at, offset = at + 1, 0

    def _near(self, sequences: IntArray) -> IntArray:
        _, documents, starts, lengths = map(np.asarray, self.open()[:4])
        sizes = lengths[documents]
        ends = np.cumsum(sizes, dtype=np.int64)
        at = np.flatnonzero(np.isin(documents, sequences))
        rows = starts.reshape(-1, 2)[:-1]
        first = (ends - sizes)[rows[:, 0]] + rows[:, 1]  # of the tokens of all documents
        begun = np.searchsorted(ends[at] - sizes[at], first + self.seq_length + 1)
        near: IntArray = np.flatnonzero(begun > np.searchsorted(ends[at], first, side="right"))
        return near

    def _has(self, begin: int, size: int) -> bool:
        """Whether tokens are on this machine; if not, they are requested."""
        tokens = self._file.tokens
        return not isinstance(tokens, RemoteTokens) or tokens.has(begin, size)

    def _load(self) -> _FastViews:
        indexes: SampleIndexes = self._indexes.load()
        file, marks, shift = self._file, None, 0
        tokens = file.tokens
        if isinstance(tokens, RemoteTokens):
            marks, shift, tokens = tokens.marks, tokens.shift, tokens.content
        return (
            *(_view(indexes.shuffle), _view(indexes.documents), _view(indexes.samples)),
            *(_view(file.lengths), _view(file.pointers), tokens, file.dtype.itemsize),
            *(marks, shift),
        )


@dataclass(frozen=True)
class RemainingIndexes:
    """The arrays of a `RemainingDataset`.

    Attributes:
        unread: Numbers of the samples that were not read, in the order of the text. Of the last,
            as many as `ends` has, only a part is read.
        shuffle: [S], sample number of each position in the data order.
        ends: Position of the end of each part in the text of these parts.
        shifts: What to add to a position in this text, for the position in the sample.
    """

    unread: IntArray
    shuffle: IntArray
    ends: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    shifts: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


class RemainingDataset(NumberedDataset):
    """The samples after the first positions of a dataset, [seq_length + 1] int32 each.

    The unread samples are joined in the order of the text, and split again. Where a sample between
    two of them was read, the text continues after a gap. Fewer tokens than a new sample has remain
    at the end. Without documents that are left out, samples have the length of before.

    Args:
        dataset: The dataset.
        indexes: Its unread samples and the new order, `RemainingIndexes` when they are loaded.
        seq_length: Tokens per sample, without the last label.
    """

    def __init__(self, dataset: NumberedDataset, indexes: IndexProvider, seq_length: int) -> None:
        super().__init__(dataset.prefix, dataset.cache, indexes, seq_length, dataset.vocab_size)
        self._dataset, self.marks_ends = dataset, dataset.marks_ends

    def read_numbered(self, sample: int, row: SampleArray) -> None:
        part = np.empty(self._dataset.seq_length + 1, dtype=np.int32)
        filled = 0
        for unread, first, size in self._parts(sample):
            self._dataset.read_numbered(unread, part)
            row[filled : filled + size] = part[first : first + size]
            filled += size

    def pieces_of(self, sample: int) -> Iterator[Piece]:
        for unread, first, size in self._parts(sample):
            start, end = first, first + size
            for piece in self._dataset.pieces_of(unread):
                if (part := piece.cut(start, end)).size > 0:
                    yield part
                start, end = start - piece.size, end - piece.size

    def _near(self, sequences: IntArray) -> IntArray:
        unread, length = np.asarray(self.open()[1]), self._dataset.seq_length
        at = np.flatnonzero(np.isin(unread, self._dataset.samples_of(sequences)))
        spans = np.arange(length // self.seq_length + 2)
        near = np.unique((at * length // self.seq_length)[:, None] + spans)
        if parts := len(self.open()[2]):  # the samples of parts are few
            near = np.union1d(near, np.arange(len(unread) - parts, len(self)))
        return near[near < len(self)]

    def _parts(self, sample: int) -> Iterator[tuple[int, int, int]]:
        """Unread samples that make up a sample: number, first of its tokens, number of them."""
        _, unread, ends, shifts = self._views or self.open()
        length, whole = self._dataset.seq_length, len(unread) - len(ends)
        position, end = sample * self.seq_length, (sample + 1) * self.seq_length
        if position < whole * length:
            while position < end:
                index, first = divmod(position, length)
                size = min(length - first, end - position)
                position += size
                # The last label is the token that follows in the same unread sample.
                yield unread[index], first, size + (position == end)
            return
        position, end = position - whole * length, end - whole * length + 1
        while position < end:
            index = bisect.bisect(ends, position)
            size = min(ends[index], end) - position
            yield unread[whole + index], position + shifts[index], size
            position += size

    def sample_id(self, position: int) -> str:
        return f"{self.name}:unread-{self.seq_length}-{self._sample(position)}"

    def _load(self) -> tuple[memoryview, ...]:
        indexes: RemainingIndexes = self._indexes.load()
        arrays = indexes.shuffle, indexes.unread, indexes.ends, indexes.shifts
        return tuple(map(_view, arrays))


def _view(array: IntArray) -> memoryview:
    """A flat view of an array, whose memory need not be aligned."""
    if not array.size:
        return memoryview(b"")
    return memoryview(array.reshape(-1).view(np.uint8)).cast(array.dtype.char)  # type: ignore


def _all_below(limit: int, tokens: SampleArray) -> bool:
    """Whether all tokens are in [0, limit): as unsigned numbers, negative ones are huge."""
    return int(np.maximum.reduce(tokens.view(np.uint32), axis=None)) < limit
