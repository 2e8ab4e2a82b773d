"""Samples of one token file: seq_length + 1 consecutive tokens, across document boundaries.

They follow its indexes or, if the sequence length of a run changes in the middle of an epoch, have
another length and come from the text that was not read.

Knows the token file and its indexes, but no splits, caches, ranks or torch.
"""

from __future__ import annotations

import bisect
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from megatron_ds.config.problems import user_error
from megatron_ds.data.remote.block_cache import USED
from megatron_ds.data.remote.token_cache import RemoteTokens
from megatron_ds.data.sample import NO_MARKS, IdArray, Mark, MarkArray
from megatron_ds.data.sample_index import IntArray, RemainingIndexes, SampleIndexes
from megatron_ds.data.token_dataset import Piece, TokenDataset, all_below
from megatron_ds.data.token_files.token_file import TokenArray, TokenFile

MAX_TOKEN = int(np.iinfo(np.int32).max)
_FastViews = tuple[
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    memoryview,
    TokenArray,
    int,
    memoryview | None,
    int,
]
"""Memory views of a file and its indexes, whose elements are read faster than numpy's: shuffle
index, documents, sample starts (position in the documents and token offset of sample i at 2 i and
2 i + 1), lengths and pointers of the sequences; the tokens and their size in bytes; of a file by
URL the states of its blocks and the shift from a token's number to its block's."""


class IndexProvider(Protocol):
    """Gives the indexes of a dataset when they are needed."""

    def __len__(self) -> int:
        """Number of samples."""

    def load(self) -> Any:
        """Loads or builds the indexes."""


class NumberedDataset(TokenDataset, ABC):
    """Samples that follow each other in a text: sample n ends where n + 1 begins.

    Args:
        file: The token file of the text.
        indexes: Loaded when the first sample is read.
        seq_length: Tokens per sample, without the last label.
        vocab_size: Exclusive upper bound of the token ids; None for no check.
    """

    def __init__(
        self,
        file: TokenFile,
        indexes: IndexProvider,
        seq_length: int,
        vocab_size: int | None,
    ) -> None:
        self.file = file
        self.prefix = file.prefix
        self.name = os.path.basename(file.prefix)
        self.cache = file.cache
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.marks = NO_MARKS if file.loss_spans is None else Mark.NO_LOSS
        self._indexes = indexes
        self._size = len(indexes)
        self._views: Any = None

    @abstractmethod
    def read_numbered(self, sample: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        """Reads a sample, as `read_into`, by its number."""

    @abstractmethod
    def sample_id(self, position: int) -> str:
        """A name of the sample that does not depend on its position in the data order."""

    @abstractmethod
    def pieces_of(self, sample: int) -> Iterator[Piece]:
        """Where the tokens of a sample come from, in their order."""

    @abstractmethod
    def _near(self, sequences: IntArray) -> IntArray:
        """Candidate samples; any other sample has no token of these sequences."""

    @abstractmethod
    def _load(self) -> Any:
        """Views of the indexes. The first is the number of the sample at each position."""

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": None}

    def __getitem__(self, position: int) -> IdArray:
        ids = np.empty(self.seq_length + 1, dtype=np.int32)
        if self.cache is None:
            self.read_into(position, ids)
        else:
            self.cache.read([(position, ids)], self.read_into)
        if self.vocab_size is not None and not all_below(self.vocab_size, ids):
            raise user_error(
                "sample-token-outside-vocabulary",
                path=self.file.tokens_path,
                sample=self._sample(position),
                token=next(token for token in ids.tolist() if not 0 <= token < self.vocab_size),
                vocab_size=self.vocab_size,
            )
        return ids

    def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        # Each sample that is read comes here; a further call would take 2 % of the time.
        if not 0 <= position < self._size:
            raise self._outside(position)
        self.read_numbered((self._views or self.open())[0][position], ids, marks)

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
            raise self._outside(position)
        sample: int = (self._views or self.open())[0][position]
        return sample

    def _outside(self, position: int) -> IndexError:
        return IndexError(f"sample {position} of a dataset of {self._size}")


class GPTDataset(NumberedDataset):
    """Samples of a token file, each [seq_length + 1] int32.

    Args:
        file: The token file.
        indexes: Its indexes, `SampleIndexes` when they are loaded.
        seq_length: Tokens per sample, without the last label.
        vocab_size: Exclusive upper bound of the token ids; None for no check.
    """

    def __init__(
        self,
        file: TokenFile,
        indexes: IndexProvider,
        seq_length: int,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(file, indexes, seq_length, vocab_size)

    def read_numbered(self, sample: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        _, documents, starts, lengths, pointers, tokens, item, blocks, shift = (
            self._views or self.open()
        )
        if blocks is not None and blocks[-1] == USED:
            blocks = None  # none is missing
        at = starts[2 * sample]
        offset = starts[2 * sample + 1]
        filled = 0
        wanted = self.seq_length + 1
        while filled < wanted:
            sequence = documents[at]
            begin = pointers[sequence] // item + offset
            size = min(lengths[sequence] - offset, wanted - filled)
            if (
                blocks is None
                or blocks[begin >> shift] == USED == blocks[(begin + size - 1) >> shift]
                or self._has(begin, size)
            ):
                part = tokens[begin : begin + size]
                # Truncated to 32 bits, an invalid 64-bit id might be valid.
                ids[filled : filled + size] = part if item < 8 else np.clip(part, -1, MAX_TOKEN)
            if marks is not None:
                if size and offset + size == lengths[sequence]:
                    marks[filled + size - 1] = Mark.LAST
                if self.marks:
                    self._mark_without_loss(begin, marks[filled : filled + size])
            filled += size
            at += 1
            offset = 0

    def _mark_without_loss(self, begin: int, marks: MarkArray) -> None:
        """Marks the tokens outside of the file's loss spans.

        Args:
            begin: Number of the first token in the file.
            marks: [n], marks of the tokens from there on.
        """
        assert self.file.loss_spans is not None
        edges = self.file.loss_spans.reshape(-1)
        first, end = np.searchsorted(edges, (begin, begin + len(marks)), side="right").tolist()
        bounds = [0, *(edges[first:end] - begin).tolist(), len(marks)]
        # Before an edge with an even number, a span's first token, the tokens are outside.
        for edge, (start, stop) in enumerate(itertools.pairwise(bounds), first):
            if edge % 2 == 0:
                marks[start:stop] |= np.uint8(Mark.NO_LOSS)

    def sample_id(self, position: int) -> str:
        return f"{self.name}:{self._sample(position)}"

    def pieces_of(self, sample: int) -> Iterator[Piece]:
        _, documents, starts, lengths, *_ = self.open()
        at = starts[2 * sample]
        offset = starts[2 * sample + 1]
        missing = self.seq_length + 1
        while missing:
            size = min(lengths[documents[at]] - offset, missing)
            if size:
                yield Piece(self.prefix, documents[at], offset, size)
            missing -= size
            at += 1
            offset = 0

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
        tokens = self.file.tokens
        return not isinstance(tokens, RemoteTokens) or tokens.has(begin, size)

    def _load(self) -> _FastViews:
        indexes: SampleIndexes = self._indexes.load()
        file = self.file
        blocks = None
        shift = 0
        tokens = file.tokens
        if isinstance(tokens, RemoteTokens):
            blocks = tokens.marks
            shift = tokens.shift
            tokens = tokens.content
        return (
            _view(indexes.shuffle),
            _view(indexes.documents),
            _view(indexes.samples),
            _view(file.lengths),
            _view(file.pointers),
            tokens,
            file.dtype.itemsize,
            blocks,
            shift,
        )


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
        super().__init__(dataset.file, indexes, seq_length, dataset.vocab_size)
        self._dataset = dataset

    def read_numbered(self, sample: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        length = self._dataset.seq_length + 1
        part = np.empty(length, dtype=np.int32)
        filled = 0
        for unread, first, size in self._parts(sample):
            part_marks = None if marks is None else np.zeros(length, dtype=np.uint8)
            self._dataset.read_numbered(unread, part, part_marks)
            ids[filled : filled + size] = part[first : first + size]
            if marks is not None and part_marks is not None:
                marks[filled : filled + size] = part_marks[first : first + size]
            filled += size

    def pieces_of(self, sample: int) -> Iterator[Piece]:
        for unread, first, size in self._parts(sample):
            start = first
            end = first + size
            for piece in self._dataset.pieces_of(unread):
                if (part := piece.cut(start, end)).size > 0:
                    yield part
                start -= piece.size
                end -= piece.size

    def _near(self, sequences: IntArray) -> IntArray:
        unread = np.asarray(self.open()[1])
        length = self._dataset.seq_length
        at = np.flatnonzero(np.isin(unread, self._dataset.samples_of(sequences)))
        spans = np.arange(length // self.seq_length + 2)
        near = np.unique((at * length // self.seq_length)[:, None] + spans)
        if parts := len(self.open()[2]):  # the samples of parts are few
            near = np.union1d(near, np.arange(len(unread) - parts, len(self)))
        return near[near < len(self)]

    def _parts(self, sample: int) -> Iterator[tuple[int, int, int]]:
        """Unread samples that make up a sample: number, first of its tokens, number of them."""
        _, unread, ends, shifts = self._views or self.open()
        length = self._dataset.seq_length
        whole = len(unread) - len(ends)
        position = sample * self.seq_length
        end = (sample + 1) * self.seq_length
        if position < whole * length:
            while position < end:
                index, first = divmod(position, length)
                size = min(length - first, end - position)
                position += size
                # The last label is the token that follows in the same unread sample.
                yield unread[index], first, size + (position == end)
            return
        position -= whole * length
        end = end - whole * length + 1
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
