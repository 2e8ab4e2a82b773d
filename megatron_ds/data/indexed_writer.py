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

from megatron_ds.config.problems import user_error
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


class TokenFileWriter:
    """Writes sequences and documents to the three files from which a pair is made.

    Memory use is constant: the index is written as it grows, lengths in their final place and the
    document index to a file of its own, and is assembled in blocks.

    Args:
        prefix: Path of the pair, for messages.
        dtype: Storage type of the tokens, see `token_dtype`.
        files: The `.bin` file, the `.idx` file and the document index, open for reading and
            writing, at the end of what `written` counts. The caller syncs and names them.
        written: What the files contain already.
    """

    def __init__(
        self,
        prefix: str,
        dtype: npt.DTypeLike,
        files: tuple[BinaryIO, BinaryIO, BinaryIO],
        written: WriteCounts = NOTHING_WRITTEN,
    ) -> None:
        self.prefix = prefix
        self.dtype = _checked_dtype(prefix, dtype)
        self.files = files
        self.written = written
        self._bin, self._index, self._documents = files
        if written == NOTHING_WRITTEN:
            with name_in_errors(self._index.name):
                self._index.truncate(HEADER.size)  # room for the header
                self._index.seek(HEADER.size)

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
            raise user_error("sequence-too-long", prefix=self.prefix, max=sizes.max())
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

    def _add(self, tokens: Tokens, lengths: IntArray, ends: IntArray) -> None:
        """Appends tokens of this dtype, sequence lengths, and document ends, which count from the
        next sequence to be added."""
        parts = (tokens, lengths.astype("<i4"), (ends + self.written.sequences).astype("<i8"))
        for file, part in zip(self.files, parts, strict=True):
            with name_in_errors(file.name):
                file.write(np.ascontiguousarray(part).data)
        added = zip(self.written, parts, strict=True)
        self.written = WriteCounts(*(before + part.size for before, part in added))

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
        _, sequences, documents = self.written
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


class IndexedWriter(TokenFileWriter):
    """Writes a pair of token files, which get their names only when they are complete.

    Use as a context manager, or call `finalize`. Leaving the `with` block by an exception removes
    the files. A killed process leaves files that end in `.partial`; the next writer of the same
    prefix overwrites them.

    Args:
        prefix: Path of the pair without `.bin` and `.idx`.
        dtype: Storage type of the tokens, see `token_dtype`.
        tokenizer_metadata: Content of the file that records the tokenizer; None for no such file.

    Raises:
        UserError: If another process writes the same prefix, or if a token does not fit the dtype.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        tokenizer_metadata: bytes | None = None,
    ) -> None:
        prefix = os.fspath(prefix)
        _checked_dtype(prefix, dtype)
        self._tokenizer_metadata = tokenizer_metadata
        self._closed = False
        with ExitStack() as undo:
            tokens = undo.enter_context(_open_locked(prefix + ".bin.partial", prefix))
            undo.callback(_remove_partial_files, prefix)
            tokens.truncate(0)
            index = undo.enter_context(open(prefix + ".idx.partial", "w+b"))
            documents = undo.enter_context(open(prefix + DOC_INDEX_SUFFIX, "w+b"))
            super().__init__(prefix, dtype, (tokens, index, documents))
            undo.pop_all()

    def finalize(self) -> None:
        """Completes and fsyncs the files, then gives them their names, the index last.

        Raises:
            OSError: If the disk does, with the name of the file.
        """
        assert not self._closed, "the pair is already closed"
        self.finish()
        for file in (self._bin, self._index):
            fsync_file(file)
        suffixes = [".bin", ".idx"]
        if self._tokenizer_metadata is not None:
            path = f"{self.prefix}{TOKENIZER_SUFFIX}.partial"
            with name_in_errors(path), open(path, "wb") as file:
                file.write(self._tokenizer_metadata)
                fsync_file(file)
            suffixes.insert(1, TOKENIZER_SUFFIX)
        # An older index must never describe the new tokens, not even for a moment.
        for suffix in (".idx", TOKENIZER_SUFFIX):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        for suffix in suffixes:
            os.replace(f"{self.prefix}{suffix}.partial", self.prefix + suffix)
        Path(self.prefix + DOC_INDEX_SUFFIX).unlink()
        fsync_path(os.path.dirname(self.prefix) or ".")
        self._close()

    def abort(self) -> None:
        """Removes the files."""
        if not self._closed:
            _remove_partial_files(self.prefix)
            self._close()

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
        assert not self._closed, "the pair is already closed"
        super()._add(tokens, lengths, ends)

    def _close(self) -> None:
        self._closed = True
        for file in self.files:
            with suppress(OSError):  # closing flushes, which fails on a full disk
                file.close()


def _remove_partial_files(prefix: str) -> None:
    suffixes = (".bin.partial", ".idx.partial", f"{TOKENIZER_SUFFIX}.partial", DOC_INDEX_SUFFIX)
    for suffix in suffixes:
        Path(prefix + suffix).unlink(missing_ok=True)


def _checked_dtype(prefix: str, dtype: npt.DTypeLike) -> np.dtype[np.generic]:
    checked = np.dtype(dtype).newbyteorder("<")
    if checked not in DTYPE_CODES:
        raise ValueError(
            f"{prefix}: tokens cannot be stored as {checked}; supported: "
            f"{', '.join(str(d) for d in DTYPE_CODES)}"
        )
    return checked


def _cast_checked(tokens: Tokens, dtype: np.dtype[np.generic], prefix: str) -> Tokens:
    if tokens.dtype == dtype or tokens.size == 0:
        return tokens.astype(dtype, copy=False)
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    low, high = int(tokens.min()), int(tokens.max())  # type: ignore[type-var]
    if low < limits.min or high > limits.max:
        raise user_error("token-exceeds-dtype", prefix=prefix, low=low, high=high, dtype=dtype)
    return tokens.astype(dtype)


def _open_locked(path: str, prefix: str) -> BinaryIO:
    """Opens the file of a writer for appending, for one process at a time.

    Raises:
        UserError: If another process has it open.
    """
    with ExitStack() as undo:
        file = undo.enter_context(open(path, "ab"))
        locked = lock_now(file)
        # Between the two lines above, another process may have finished and renamed this file.
        if locked is False or not is_at(file, path):
            raise user_error("prefix-in-use", prefix=prefix)
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
            raise user_error("truncated-while-written", name=file.name)
        yield block
