"""Writer of Megatron's pair of token files; `indexed_dataset.py` describes the format.

Knows no tokenizers, samples or torch.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.indexed_dataset import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    TOKENIZER_SUFFIX,
    VERSION,
    IndexedDataset,
    IntArray,
    Tokens,
    sequence_offsets,
)
from megatron_ds.fileio.atomic import (
    fsync_file,
    fsync_path,
    name_in_errors,
    open_read_write,
    truncate_to,
)
from megatron_ds.fileio.file_lock import is_at, lock_now

DOC_INDEX_SUFFIX = ".documents.partial"
"""Suffix of the temporary file of the document index while a pair is written."""

BLOCK_ITEMS = 1 << 16
"""Tokens or index entries written at once."""


class WriteCounts(NamedTuple):
    """Tokens, sequences and documents written to a pair."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


NOTHING_WRITTEN = WriteCounts()


class IndexedWriter:
    """Writes a pair of token files, which get their names only when they are complete.

    Memory use is constant: the index is written as it grows, lengths in their final place and the
    document index to a file of its own, and is assembled in blocks.

    Use as a context manager, or call `finalize`. Leaving the `with` block by an exception removes
    the files. A killed process leaves files that end in `.partial`; the next writer of the same
    prefix overwrites or continues them.

    Args:
        prefix: Path of the pair without `.bin` and `.idx`.
        dtype: Storage type of the tokens, see `token_dtype`.
        tokenizer_metadata: Content of the file that records the tokenizer; None for no such file.
        written: How much of an interrupted pair to keep; everything after it is truncated.

    Raises:
        UserError: If another process writes the same prefix, if the interrupted pair is shorter
            than `written`, or if a token does not fit the dtype.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        tokenizer_metadata: bytes | None = None,
        written: WriteCounts = NOTHING_WRITTEN,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self._tokenizer_metadata = tokenizer_metadata
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPE_CODES:
            raise ValueError(
                f"{self.prefix}: tokens cannot be stored as {self.dtype}; supported: "
                f"{', '.join(str(d) for d in DTYPE_CODES)}"
            )
        self.written = written
        self._complete = False
        self._closed = False
        sizes = (
            written.tokens * self.dtype.itemsize,
            HEADER.size + 4 * written.sequences,
            8 * written.documents,
        )
        with ExitStack() as undo:
            self._bin = undo.enter_context(open_locked(self.prefix + ".bin.partial", self.prefix))
            if written == NOTHING_WRITTEN:
                undo.callback(self._remove)
            self._index = undo.enter_context(open_read_write(self.prefix + ".idx.partial"))
            self._documents = undo.enter_context(open_read_write(self.prefix + DOC_INDEX_SUFFIX))
            if written == NOTHING_WRITTEN:
                for file in self.files:
                    file.truncate(0)
                with name_in_errors(self._index.name):
                    self._index.truncate(HEADER.size)  # room for the header
            for file, size in zip(self.files, sizes, strict=True):
                truncate_to(file, size)
            undo.pop_all()

    @property
    def files(self) -> tuple[BinaryIO, BinaryIO, BinaryIO]:
        """The files that grow with `written`; callers that need durability must fsync them."""
        return self._bin, self._index, self._documents

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Appends a document of one sequence.

        Args:
            tokens: [length] integers.
        """
        array = np.asarray(tokens)
        self.add_documents(array, np.array([array.size]))

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        sequences: npt.ArrayLike | None = None,
    ) -> None:
        """Appends documents.

        Args:
            tokens: [sum of lengths] integers, the concatenated sequences.
            lengths: [n], tokens of each sequence.
            sequences: [d], sequences of each document; None for one each.

        Raises:
            ValueError: If the arguments do not agree.
            UserError: If a token does not fit the dtype, or a sequence has more than 2^31 - 1.
        """
        array, sizes = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        if int(sizes.sum()) != array.size:
            raise ValueError(
                f"{self.prefix}: {array.size} tokens, but sequences of {sizes.sum()} tokens"
            )
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise UserError(
                Problem(
                    "sequence-too-long",
                    f"{self.prefix}: a sequence of {sizes.max()} tokens exceeds the format's limit",
                )
            )
        if sequences is None:
            ends = np.arange(1, sizes.size + 1)
        else:
            ends = np.cumsum(np.asarray(sequences, dtype=np.int64))
            if (int(ends[-1]) if ends.size else 0) != sizes.size:
                raise ValueError(
                    f"{self.prefix}: {sizes.size} sequences, but documents of "
                    f"{ends[-1] if ends.size else 0} sequences"
                )
        self._add(_cast_checked(array, self.dtype, self.prefix), sizes, ends)

    def add_dataset(self, data: IndexedDataset) -> None:
        """Appends all sequences and documents of another pair of the same dtype."""
        if data.dtype != self.dtype:
            raise ValueError(f"{data.prefix} holds {data.dtype}, not {self.dtype}")
        nothing = np.zeros(0, np.int64)
        ends = data.document_index[1:]
        # Document ends count from the pair's first sequence, so its sequences are added last.
        for first in range(0, data.tokens.size, BLOCK_ITEMS):
            self._add(data.tokens[first : first + BLOCK_ITEMS], nothing, nothing)
        for first in range(0, len(ends), BLOCK_ITEMS):
            self._add(data.tokens[:0], nothing, ends[first : first + BLOCK_ITEMS])
        for first in range(0, len(data), BLOCK_ITEMS):
            self._add(data.tokens[:0], data.lengths[first : first + BLOCK_ITEMS], nothing)

    def flush_all(self) -> None:
        """Completes the files and fsyncs them, under their temporary names.

        Raises:
            OSError: If the disk does, with the name of the file.
        """
        self._check_open()
        for file in (self._bin, self._documents):
            fsync_file(file)
        with name_in_errors(self._index.name):
            self._write_index()
            fsync_file(self._index)
        partial = f"{self.prefix}{TOKENIZER_SUFFIX}.partial"
        if self._tokenizer_metadata is not None:
            with name_in_errors(partial), open(partial, "wb") as file:
                file.write(self._tokenizer_metadata)
                fsync_file(file)
        self._complete = True

    def finalize(self) -> None:
        """Completes and fsyncs the files, then gives them their names, the index last."""
        if not self._complete:
            self.flush_all()
        self._check_open()
        publish_pair(self.prefix, has_tokenizer_metadata=self._tokenizer_metadata is not None)
        self._close()

    def abort(self) -> None:
        """Removes the files."""
        if self._closed:
            return
        self._remove()
        self.close_keeping()

    def _remove(self) -> None:
        for suffix in (
            ".bin.partial",
            ".idx.partial",
            DOC_INDEX_SUFFIX,
            f"{TOKENIZER_SUFFIX}.partial",
        ):
            Path(self.prefix + suffix).unlink(missing_ok=True)

    def close_keeping(self) -> None:
        """Closes and keeps the files under their temporary names, to be continued later."""
        self._closed = True
        for file in self.files:
            with suppress(OSError):  # closing flushes, which fails on a full disk
                file.close()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and not self._closed:
                self.finalize()
        finally:
            self.abort()

    def _add(self, tokens: Tokens, lengths: IntArray, ends: IntArray) -> None:
        """Appends tokens of this dtype, sequence lengths, and document ends, which count from the
        next sequence to be added."""
        self._check_open()
        parts = (tokens, lengths.astype("<i4"), (ends + self.written.sequences).astype("<i8"))
        for file, part in zip(self.files, parts, strict=True):
            with name_in_errors(file.name):
                file.write(np.ascontiguousarray(part).data)
        added = zip(self.written, parts, strict=True)
        self.written = WriteCounts(*(before + part.size for before, part in added))

    def _write_index(self) -> None:
        """Completes the index: lengths are in place; adds pointers, documents and the header."""
        _, sequences, documents = self.written
        self._index.flush()
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
        # The header comes last: an interrupted index begins with zeros and is never taken for one.
        self._index.seek(0)
        head = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[self.dtype], sequences, documents + 1)
        self._index.write(head)

    def _close(self) -> None:
        self._closed = True
        for file in self.files:
            file.close()

    def _check_open(self) -> None:
        assert not self._closed, "the pair is already closed"


def publish_pair(prefix: str, *, has_tokenizer_metadata: bool) -> None:
    """Gives the files of a complete pair their names, the index last.

    Can be repeated after an interruption.

    Args:
        prefix: Path of the pair.
        has_tokenizer_metadata: Whether the pair has a file that records its tokenizer.
    """
    if os.path.exists(prefix + ".bin.partial"):
        # An older index must never describe the new tokens, not even for a moment.
        for suffix in (".idx", TOKENIZER_SUFFIX):
            Path(prefix + suffix).unlink(missing_ok=True)
    for suffix in (
        (".bin", TOKENIZER_SUFFIX, ".idx") if has_tokenizer_metadata else (".bin", ".idx")
    ):
        with suppress(FileNotFoundError):  # already renamed
            os.replace(f"{prefix}{suffix}.partial", prefix + suffix)
    Path(prefix + DOC_INDEX_SUFFIX).unlink(missing_ok=True)
    fsync_path(os.path.dirname(prefix) or ".")


def _cast_checked(tokens: Tokens, dtype: np.dtype[np.generic], prefix: str) -> Tokens:
    if tokens.dtype == dtype or tokens.size == 0:
        return tokens.astype(dtype, copy=False)
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    low, high = int(tokens.min()), int(tokens.max())  # type: ignore[type-var]
    if low < limits.min or high > limits.max:
        raise UserError(
            Problem(
                "token-exceeds-dtype",
                f"{prefix}: token ids from {low} to {high} do not fit {dtype}",
            )
        )
    return tokens.astype(dtype)


def open_locked(path: str, prefix: str) -> BinaryIO:
    """Opens the file of a writer for appending, for one process at a time.

    Raises:
        UserError: If another process has it open.
    """
    with ExitStack() as undo:
        file = undo.enter_context(open(path, "ab"))
        locked = lock_now(file)
        # Between the two lines above, another process may have finished and renamed this file.
        if locked is False or not is_at(file, path):
            raise UserError(
                Problem("prefix-in-use", f"{prefix}: another process is writing this prefix")
            )
        if locked is None:
            warnings.warn(
                f"{path} is on a file system without locks: no other process may write it",
                stacklevel=3,
            )
        undo.pop_all()
        return file


def _read_blocks(file: BinaryIO, dtype: str, count: int) -> Iterator[IntArray]:
    """Yields `count` numbers of a file from its current position, BLOCK_ITEMS at a time."""
    for first in range(0, count, BLOCK_ITEMS):
        size = min(BLOCK_ITEMS, count - first)
        block = np.fromfile(file, dtype, size)
        if len(block) < size:
            raise UserError(
                Problem(
                    "truncated-while-written",
                    f"{file.name} was truncated by another process while it was written",
                )
            )
        yield block
