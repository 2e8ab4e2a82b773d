"""Writer of Megatron's pair of token files; `indexed_dataset.py` describes the format.

Knows no tokenizers, samples or torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import user_error
from megatron_ds.data.token_files.file_formats import MAGIC
from megatron_ds.data.token_files.indexed_dataset import (
    DTYPE_CODES,
    HEADER,
    SPANS_HEADER,
    SPANS_MAGIC,
    TOKENIZER_SUFFIX,
    VERSION,
    sequence_offsets,
)
from megatron_ds.data.token_files.token_file import IntArray, TokenFile, Tokens
from megatron_ds.fileio.atomic import StrPath, name_in_errors
from megatron_ds.fileio.resumable import ResumableOutput

WRITER_SUFFIXES = (".bin", ".idx", ".documents", ".loss")
"""Files of a `TokenFileWriter`: the last two hold parts of the index until it is complete."""
WORK_SUFFIXES = (*WRITER_SUFFIXES, TOKENIZER_SUFFIX)
"""Files of a pair in a work folder."""
BLOCK_ITEMS = 1 << 16
"""Tokens or index entries written at once."""


class WriteCounts(NamedTuple):
    """Tokens, sequences, documents, and edges of loss spans, written to a pair."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    edges: int = 0


NOTHING_WRITTEN = WriteCounts()


class TokenFileWriter:
    """Writes sequences and documents to four files, which are then joined into a pair.

    Memory use is constant: the index is written as it grows, lengths in their final place, the
    document index and the loss spans to separate files, and is assembled in blocks.

    Args:
        prefix: Path of the pair, for messages.
        dtype: Storage type of the tokens, see `token_dtype`.
        files: The files of WRITER_SUFFIXES, open for reading and writing, at the end of what
            `written` counts. The caller syncs and names them.
        written: Counts of the content that the files have already.
        has_loss_spans: Whether the pair records which tokens have a loss.
    """

    def __init__(
        self,
        prefix: str,
        dtype: npt.DTypeLike,
        files: Sequence[BinaryIO],
        written: WriteCounts = NOTHING_WRITTEN,
        *,
        has_loss_spans: bool = False,
    ) -> None:
        self.prefix = prefix
        self.dtype = _checked_dtype(prefix, dtype)
        self.files = files
        self.written = written
        self.has_loss_spans = has_loss_spans
        _, self._index, self._documents, self._spans = files
        if written == NOTHING_WRITTEN:
            with name_in_errors(self._index.name):
                self._index.truncate(HEADER.size)  # room for the header
                self._index.seek(HEADER.size)

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        sequences: npt.ArrayLike | None = None,
        loss_spans: npt.ArrayLike | None = None,
    ) -> None:
        """Appends documents.

        Args:
            tokens: [sum of lengths] integers, the concatenated sequences.
            lengths: [n], tokens of each sequence.
            sequences: [d], sequences of each document; None for one per document.
            loss_spans: [m, 2], first and end of each range of `tokens` with loss, if the writer has
                loss spans; None for all tokens.

        Raises:
            ValueError: If the arguments do not agree.
            UserError: If a token does not fit the dtype, or a sequence has more than 2^31 - 1.
        """
        array = np.asarray(tokens)
        sizes = np.asarray(lengths, dtype=np.int64)
        counts = np.ones_like(sizes) if sequences is None else np.asarray(sequences, np.int64)
        if (sizes.sum(), counts.sum()) != (array.size, sizes.size):
            raise ValueError(
                f"{self.prefix}: {array.size} tokens in {sizes.size} sequences, but the lengths "
                f"give {sizes.sum()} tokens and the documents {counts.sum()} sequences"
            )
        if sizes.max(initial=0) > np.iinfo(np.int32).max:
            raise user_error("sequence-too-long", prefix=self.prefix, max=sizes.max())
        self._add_spans(array.size, loss_spans)
        self._add(_cast_checked(array, self.dtype, self.prefix), sizes, np.cumsum(counts))

    def add_stream(self, tokens: Tokens, lengths: IntArray, sequences: IntArray) -> None:
        """Appends tokens of this dtype, and the documents that end in them.

        A document may span several calls, the last of which gives its lengths. At the end of all
        calls the lengths must sum up to the tokens.

        Args:
            tokens: [n] tokens, of which the last may belong to a document that ends later.
            lengths: [s], tokens of the sequences of the documents that end here, at most 2^31 - 1.
            sequences: [d], sequences of each document.
        """
        self._add_spans(tokens.size, None)
        self._add(tokens, lengths, np.cumsum(sequences))

    def add_dataset(self, data: TokenFile) -> None:
        """Appends all sequences and documents of a token file of the same dtype."""
        if data.dtype != self.dtype:
            raise ValueError(f"{data.prefix} holds {data.dtype}, not {self.dtype}")
        nothing = np.zeros(0, np.int64)
        ends = data.document_index[1:]
        self._add_spans(data.tokens.size, data.loss_spans)
        # Document ends count from the file's first sequence, so its sequences are added last.
        for first in range(0, data.tokens.size, BLOCK_ITEMS):
            self._add(data.tokens[first : first + BLOCK_ITEMS], nothing, nothing)
        for first in range(0, len(ends), BLOCK_ITEMS):
            self._add(data.tokens[:0], nothing, ends[first : first + BLOCK_ITEMS])
        for first in range(0, len(data), BLOCK_ITEMS):
            self._add(data.tokens[:0], data.lengths[first : first + BLOCK_ITEMS], nothing)

    def _add(self, tokens: Tokens, lengths: IntArray, ends: IntArray) -> None:
        """Appends tokens of this dtype, sequence lengths, and document ends, which count from the
        next sequence to be added."""
        parts = (tokens, lengths.astype("<i4"), (ends + self.written.sequences).astype("<i8"))
        for file, part in zip(self.files, parts, strict=False):
            with name_in_errors(file.name):
                file.write(np.ascontiguousarray(part).data)
        added = zip(self.written, parts, strict=False)
        counts = (before + part.size for before, part in added)
        self.written = WriteCounts(*counts)._replace(edges=self.written.edges)

    def _add_spans(self, size: int, spans: npt.ArrayLike | None) -> None:
        """Appends the loss spans of the next tokens.

        Args:
            size: Number of the tokens.
            spans: [m, 2], from the first of them; None for all of them.

        Raises:
            ValueError: If there are spans, and the writer has none.
        """
        if not self.has_loss_spans:
            if spans is not None:
                raise ValueError(f"{self.prefix}: loss spans for a pair without them")
            return
        edges = np.asarray([(0, size)] if spans is None else spans, dtype="<i8").reshape(-1)
        with name_in_errors(self._spans.name):
            self._spans.write((edges + self.written.tokens).astype("<i8").tobytes())
        self.written = self.written._replace(edges=self.written.edges + edges.size)

    def finish(self) -> None:
        """Completes the index: adds pointers, documents and the header to the lengths.

        Raises:
            OSError: If a file cannot be written, with its name.
        """
        for file in self.files:
            with name_in_errors(file.name):
                file.flush()
        with name_in_errors(self._index.name):
            self._complete_index()

    def _complete_index(self) -> None:
        _, sequences, documents, edges = self.written
        self._index.truncate(HEADER.size + 4 * sequences)
        self._index.seek(0, os.SEEK_END)
        end = 0
        with open(self._index.name, "rb") as lengths:
            lengths.seek(HEADER.size)
            for sizes in _read_blocks(lengths, "<i4", sequences):
                pointers = sequence_offsets(sizes, self.dtype.itemsize) + end
                self._index.write(pointers.astype("<i8").tobytes())
                end = int(pointers[-1]) + int(sizes[-1]) * self.dtype.itemsize
        self._index.write(np.zeros(1, "<i8").tobytes())
        with open(self._documents.name, "rb") as ends:
            for block in _read_blocks(ends, "<i8", documents):
                self._index.write(block.tobytes())
        if self.has_loss_spans:
            self._index.write(SPANS_HEADER.pack(SPANS_MAGIC, edges // 2))
            with open(self._spans.name, "rb") as spans:
                for block in _read_blocks(spans, "<i8", edges):
                    self._index.write(block.tobytes())
        # The header comes last: an interrupted index begins with zeros and is never taken for one.
        self._index.seek(0)
        head = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], sequences, documents + 1)
        self._index.write(head)


@contextmanager
def pair_writer(
    prefix: StrPath,
    dtype: npt.DTypeLike,
    tokenizer_metadata: bytes | None = None,
    *,
    has_loss_spans: bool = False,
) -> Iterator[TokenFileWriter]:
    """Writes a pair of token files, which get their names only when they are complete.

    Leaving the `with` block by an exception removes the files. A killed process leaves a folder
    that ends in `.work`; the next writer of the same prefix replaces it.

    Args:
        prefix: Path of the pair without `.bin` and `.idx`.
        dtype: Storage type of the tokens, see `token_dtype`.
        tokenizer_metadata: Content of the file that records the tokenizer; None for no such file.
        has_loss_spans: Whether the pair records which tokens have a loss.

    Yields:
        The writer.

    Raises:
        UserError: If another process writes the same prefix.
        OSError: If the disk does, with the name of the file.
    """
    prefix = os.fspath(prefix)
    checked = _checked_dtype(prefix, dtype)
    names = dict.fromkeys(WORK_SUFFIXES, "")
    # Not the folder of an interrupted preprocessing, which would be replaced.
    with ResumableOutput(f"{prefix}.pair", {}, names, resume=False, restart=True) as work:
        files = [work.files[suffix] for suffix in WORK_SUFFIXES]
        raw = [file.raw for file in files[: len(WRITER_SUFFIXES)]]
        writer = TokenFileWriter(prefix, checked, raw, has_loss_spans=has_loss_spans)
        yield writer
        writer.finish()
        published = [".bin", ".idx"]
        if tokenizer_metadata is not None:
            files[-1].write(tokenizer_metadata)
            published.insert(1, TOKENIZER_SUFFIX)
        work.commit({}, finished=True)
        # An older index must never describe the new tokens, not even for a moment.
        stale = {".bin": [prefix + ".idx", prefix + TOKENIZER_SUFFIX]}
        work.publish({suffix: prefix + suffix for suffix in published}, stale)


def _checked_dtype(prefix: str, dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    checked = np.dtype(dtype).newbyteorder("<")
    if checked not in DTYPE_CODES:
        raise ValueError(
            f"{prefix}: tokens cannot be stored as {checked}; supported: "
            f"{', '.join(map(str, DTYPE_CODES))}"
        )
    return checked


def _cast_checked(tokens: Tokens, dtype: np.dtype[np.generic], prefix: str) -> Tokens:
    if tokens.dtype == dtype or tokens.size == 0:
        return tokens.astype(dtype, copy=False)
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    low = int(tokens.min())  # type: ignore[type-var]
    high = int(tokens.max())  # type: ignore[type-var]
    if low < limits.min or high > limits.max:
        raise user_error("token-exceeds-dtype", prefix=prefix, low=low, high=high, dtype=dtype)
    return tokens.astype(dtype)


def _read_blocks(file: BinaryIO, dtype: str, count: int) -> Iterator[IntArray]:
    """Yields `count` numbers of a file from its current position, BLOCK_ITEMS at a time."""
    for first in range(0, count, BLOCK_ITEMS):
        size = min(BLOCK_ITEMS, count - first)
        block = np.fromfile(file, dtype, size)
        if len(block) < size:
            raise user_error("truncated-while-written", name=file.name)
        yield block
