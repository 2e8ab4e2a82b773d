"""Megatron's `.bin/.idx` pair of token files: reader and writer, byte-compatible.

The `.bin` holds the token arrays of all sequences back to back. The `.idx`, little-endian:

    offset       size  content
    0            9     magic `MMIDIDX` and two NULs
    9            8     uint64 version, 1
    17           1     uint8 dtype code
    18           8     uint64 n, number of sequences
    26           8     uint64 d, number of documents + 1
    34           4n    int32 length of each sequence in tokens
    34+4n        8n    int64 byte offset of each sequence in the `.bin`
    34+12n       8d    int64 number of the first sequence of each document; the last entry is n

This file knows neither tokenizers nor samples nor torch.
"""

from __future__ import annotations

import os
import stat
import struct
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.fileio.atomic import (
    fsync_file,
    fsync_path,
    name_in_errors,
    open_read_write,
    truncate_to,
)
from megatron_ds.fileio.file_lock import is_at, lock_now
from megatron_ds.fileio.memory_map import map_file

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
TOKENIZER_SUFFIX = ".tokenizer.json"
"""End of the name of the file beside a pair that says which tokenizer made it."""
DOC_INDEX_SUFFIX = ".documents.partial"
"""End of the name of the file that takes the document index while a pair is written."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
UINT16_VOCAB = 65500
"""Vocabularies below this are written as uint16, as in every Megatron."""
DOCUMENTS_PROBED = 1000
CHUNK = 1 << 20
"""Sequences that are checked at once: memory stays flat, whatever the size of the index."""

BLOCK = 1 << 16
"""Numbers of an index or tokens that are written at once."""

Tokens = npt.NDArray[np.generic]
IntArray = npt.NDArray[np.integer]


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """The type in which Megatron stores tokens of a vocabulary: uint16 below 65 500, else int32."""
    return DTYPES[8] if vocab_size < UINT16_VOCAB else DTYPES[4]


class IndexedDataset:
    """The sequences of one `.bin/.idx` pair, read through memory maps.

    lengths [n]: tokens of each sequence. pointers [n]: byte offsets into the `.bin`. document_index
    [d + 1]: first sequence of each document.

    Raises ValueError, naming the file, for anything that is not a complete pair of Megatron's
    format. Files of microsoft/Megatron-DeepSpeed made with --append-eod do not count the
    end-of-document tokens in their lengths: such a pair is recognised, read with the lengths that
    the tokens really have, and warned about.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype, self.lengths, self.pointers, self.document_index = _read_index(self.prefix)
        self._tokens: Tokens = _map(self.prefix + ".bin").view(np.uint8)
        self._check_tokens()
        self._tokens = self._tokens.view(self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Tokens:
        """`length` tokens of a sequence from token `offset` on (to its end if None): a read-only
        view of the file."""
        size = int(self.lengths[index])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(
                f"{self.prefix}: sequence {index} has {size} tokens, "
                f"asked were {length} from {offset} on"
            )
        start = int(self.pointers[index]) // self.dtype.itemsize + offset
        return self._tokens[start : start + length]

    @property
    def tokens(self) -> Tokens:
        """All tokens of the file, one read-only array."""
        return self._tokens

    def warm_up(self) -> None:
        """Read the token file once, so that it lies in the page cache."""
        with open(self.prefix + ".bin", "rb", buffering=0) as file:
            buffer = bytearray(1 << 24)
            while file.readinto(buffer):
                pass

    def _check_tokens(self) -> None:
        item = self.dtype.itemsize
        size = self._tokens.size
        expected = int(self.pointers[-1]) + int(self.lengths[-1]) * item if len(self.lengths) else 0
        if size == expected:
            return
        if not self._count_missing_eod(size):
            raise ValueError(
                f"{self.prefix}.bin has {size} bytes, but {self.prefix}.idx describes {expected}: "
                f"the pair is "
                "incomplete or its files belong to different runs; preprocess the data again"
            )

    def _count_missing_eod(self, size: int) -> bool:
        """Repair a pair that does not count one EOD per document; False if it is no such pair."""
        item = self.dtype.itemsize
        starts, ends = self.document_index[:-1], self.document_index[1:]
        last = ends[ends > starts] - 1
        lengths = np.array(self.lengths, dtype=np.int64)
        if size != (int(lengths.sum()) + len(last)) * item:
            return False
        lengths[last] += 1
        pointers = _offsets(lengths, item)
        probed = last[:: max(1, len(last) // DOCUMENTS_PROBED)]
        finals = self._tokens.view(self.dtype)[pointers[probed] // item + lengths[probed] - 1]
        if len(np.unique(finals)) != 1:
            return False
        warnings.warn(
            f"{self.prefix}.idx does not count the end-of-document token {finals[0]} of its "
            f"{len(last)} documents (as microsoft/Megatron-DeepSpeed writes it); it is read with "
            "the right lengths. Preprocess the data again to have a right file",
            stacklevel=4,
        )
        self.lengths, self.pointers = lengths.astype(np.int32), pointers
        return True


class WriteCounts(NamedTuple):
    """How much of a pair was written: tokens, sequences and documents."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0


NOTHING = WriteCounts()


class IndexedWriter:
    """Writes a `.bin/.idx` pair that appears under its name only when it is complete.

    Memory is flat: the index, too, is written as it comes, the lengths where they stay and the
    documents to a file of their own, and is put together in blocks.

    Use as a context manager, or call `finalize()`; leaving the `with` block by an exception removes
    what was written. A killed run leaves files that end in `.partial`, which the next one
    overwrites, or continues: written: how much of them is kept, what follows is cut off. made_by:
    what the file beside the pair is to say of the tokenizer; one of an older pair goes. Raises
    ValueError if another process is writing the same prefix, if less is there than is to be
    continued, or if a token does not fit the dtype.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        made_by: bytes | None = None,
        written: WriteCounts = NOTHING,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self._made_by = made_by
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(
                f"{self.prefix}: tokens cannot be stored as {self.dtype}; valid: "
                f"{', '.join(str(d) for d in CODES)}"
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
            if written == NOTHING:
                undo.callback(self._remove)
            self._index = undo.enter_context(open_read_write(self.prefix + ".idx.partial"))
            self._documents = undo.enter_context(open_read_write(self.prefix + DOC_INDEX_SUFFIX))
            if written == NOTHING:
                for file in self.files:
                    file.truncate(0)
                with name_in_errors(self._index.name):
                    self._index.truncate(HEADER.size)  # room for what is known at the end
            for file, size in zip(self.files, sizes, strict=True):
                truncate_to(file, size)
            undo.pop_all()

    @property
    def files(self) -> tuple[BinaryIO, BinaryIO, BinaryIO]:
        """The files that grow with `written`; who wants it durable flushes and syncs them."""
        return self._bin, self._index, self._documents

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document of one sequence. tokens: [length] integers."""
        array = np.asarray(tokens)
        self.add_documents(array, np.array([array.size]))

    def add_documents(
        self,
        tokens: npt.ArrayLike,
        lengths: npt.ArrayLike,
        sequences: npt.ArrayLike | None = None,
    ) -> None:
        """Append documents. tokens: [sum of lengths] integers, back to back; lengths: [n] of the
        sequences; sequences: [d] how many make each document, one each if None."""
        array, sizes = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        if int(sizes.sum()) != array.size:
            raise ValueError(
                f"{self.prefix}: {array.size} tokens do not make sequences of {sizes.sum()}"
            )
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise ValueError(f"{self.prefix}: a sequence of {sizes.max()} tokens is too long")
        if sequences is None:
            ends = np.arange(1, sizes.size + 1)
        else:
            ends = np.cumsum(np.asarray(sequences, dtype=np.int64))
            if (int(ends[-1]) if ends.size else 0) != sizes.size:
                raise ValueError(
                    f"{self.prefix}: {sizes.size} sequences do not make documents of "
                    f"{ends[-1] if ends.size else 0}"
                )
        self._add(_fitting(array, self.dtype, self.prefix), sizes, ends)

    def add_dataset(self, data: IndexedDataset) -> None:
        """Append all sequences and documents of another pair of the same dtype."""
        if data.dtype != self.dtype:
            raise ValueError(f"{data.prefix} holds {data.dtype}, not {self.dtype}")
        nothing = np.zeros(0, np.int64)
        ends = data.document_index[1:]
        # What a pair's documents end at counts from its own beginning; sequences are added last.
        for first in range(0, data.tokens.size, BLOCK):
            self._add(data.tokens[first : first + BLOCK], nothing, nothing)
        for first in range(0, len(ends), BLOCK):
            self._add(data.tokens[:0], nothing, ends[first : first + BLOCK])
        for first in range(0, len(data), BLOCK):
            self._add(data.tokens[:0], data.lengths[first : first + BLOCK], nothing)

    def flush_all(self) -> None:
        """Flush both files to disk, which may fail or take long, and leave them without names."""
        self._check_open()
        for file in (self._bin, self._documents):
            fsync_file(file)
        with name_in_errors(self._index.name):
            self._write_index()
            fsync_file(self._index)
        partial_made_by = f"{self.prefix}{TOKENIZER_SUFFIX}.partial"
        if self._made_by is not None:
            with name_in_errors(partial_made_by), open(partial_made_by, "wb") as file:
                file.write(self._made_by)
                fsync_file(file)
        self._complete = True

    def finalize(self) -> None:
        """Flush both files to disk, then give them their names, the index last."""
        if not self._complete:
            self.flush_all()
        self._check_open()
        publish_pair(self.prefix, made_by=self._made_by is not None)
        self._close()

    def abort(self) -> None:
        """Remove what was written."""
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
        """End and keep what was written, without names, for a writer that continues it."""
        self._closed = True
        for file in self.files:
            with suppress(OSError):  # what the disk has no room for is not wanted any more
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
        """Append tokens of this dtype, sequences of these lengths, and documents that end at these
        sequences, counted from the first that is added next."""
        self._check_open()
        parts = (tokens, lengths.astype("<i4"), (ends + self.written.sequences).astype("<i8"))
        for file, part in zip(self.files, parts, strict=True):
            with name_in_errors(file.name):
                file.write(np.ascontiguousarray(part).data)
        added = zip(self.written, parts, strict=True)
        self.written = WriteCounts(*(before + part.size for before, part in added))

    def _write_index(self) -> None:
        """Put what is missing around the lengths: the pointers, the documents and the header."""
        _, sequences, documents = self.written
        self._index.flush()
        self._index.truncate(HEADER.size + 4 * sequences)
        self._index.seek(0, os.SEEK_END)
        end = 0
        with open(self._index.name, "rb") as lengths:
            lengths.seek(HEADER.size)
            for sizes in _blocks(lengths, "<i4", sequences):
                pointers = _offsets(sizes, self.dtype.itemsize) + end
                self._index.write(pointers.astype("<i8").tobytes())
                end = int(pointers[-1]) + int(sizes[-1]) * self.dtype.itemsize
        self._index.write(np.zeros(1, "<i8").tobytes())
        with open(self._documents.name, "rb") as ends:
            for block in _blocks(ends, "<i8", documents):
                self._index.write(block.tobytes())
        # Last: a file that begins with zeros is no index.
        self._index.seek(0)
        head = HEADER.pack(MAGIC, VERSION, CODES[self.dtype], sequences, documents + 1)
        self._index.write(head)

    def _close(self) -> None:
        self._closed = True
        for file in self.files:
            file.close()

    def _check_open(self) -> None:
        assert not self._closed, "the pair was already finished"


def publish_pair(prefix: str, *, made_by: bool) -> None:
    """Give a complete pair its names, the index last; begun before, it is continued.

    made_by: whether it has a file that names its tokenizer.
    """
    if os.path.exists(prefix + ".bin.partial"):
        # What describes older tokens must not stand beside the new ones, not even for a moment.
        for suffix in (".idx", TOKENIZER_SUFFIX):
            Path(prefix + suffix).unlink(missing_ok=True)
    for suffix in (".bin", TOKENIZER_SUFFIX, ".idx") if made_by else (".bin", ".idx"):
        with suppress(FileNotFoundError):  # it has its name
            os.replace(f"{prefix}{suffix}.partial", prefix + suffix)
    Path(prefix + DOC_INDEX_SUFFIX).unlink(missing_ok=True)
    fsync_path(os.path.dirname(prefix) or ".")


def _read_index(
    prefix: str,
) -> tuple[np.dtype[np.generic], IntArray, IntArray, IntArray]:
    path = prefix + ".idx"
    data = _map(path)
    head = data[: HEADER.size].tobytes()
    if head.startswith(LEGACY_MAGIC):
        raise ValueError(
            f"{path} is of the old `lazy`/`cached` format (TNTIDX), which is not read; preprocess "
            f"the text again, "
            "or convert it with the fork that wrote it (--dataset-impl mmap)"
        )
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError(f"{path} is no Megatron index: it does not begin with MMIDIDX")
    _, version, code, n, d = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(f"{path} has format version {version}; only version {VERSION} is known")
    if code in (6, 7):
        raise ValueError(
            f"{path} has dtype code {code}: a floating-point type, float32 in some forks and "
            f"float64 in others. "
            "Tokens are integers; preprocess the data again"
        )
    if code not in DTYPES:
        raise ValueError(f"{path} has dtype code {code}; valid: {sorted(DTYPES)}")
    expected = HEADER.size + 12 * n + 8 * d
    # Megatron-LM's multimodal files append one byte per sequence and do not say so in the header.
    if data.size not in (expected, expected + n):
        raise ValueError(
            f"{path} has {data.size} bytes, but its header describes {expected} ({n} sequences, "
            f"{d - 1} documents): "
            "it is truncated or damaged"
        )
    documents_at = HEADER.size + 12 * n
    lengths = data[HEADER.size : HEADER.size + 4 * n].view("<i4")
    pointers = data[HEADER.size + 4 * n : documents_at].view("<i8")
    documents = data[documents_at:expected].view("<i8")
    if d == 0 or int(documents[0]) != 0 or int(documents[-1]) != n:
        raise ValueError(f"{path}: its document index does not end at its {n} sequences")
    _check_order(path, lengths, pointers, documents, DTYPES[code].itemsize)
    return DTYPES[code], lengths, pointers, documents


def _check_order(
    path: str, lengths: IntArray, pointers: IntArray, documents: IntArray, itemsize: int
) -> None:
    """That sequences stand back to back and documents one after the other, as all writers do."""
    end = 0
    for first in range(0, len(lengths), CHUNK):
        sizes = lengths[first : first + CHUNK]
        if int(sizes.min()) < 0:
            at = first + int(sizes.argmin())
            raise ValueError(f"{path} is damaged: sequence {at} has {lengths[at]} tokens")
        expected = _offsets(sizes, itemsize) + end
        wrong = np.flatnonzero(expected != pointers[first : first + CHUNK])
        if len(wrong):
            at = first + int(wrong[0])
            raise ValueError(
                f"{path} is damaged: sequence {at} begins at byte {pointers[at]}, but those before "
                f"it end at {expected[wrong[0]]}"
            )
        end = int(expected[-1]) + int(sizes[-1]) * itemsize
    for first in range(0, len(documents) - 1, CHUNK):
        starts = documents[first : first + CHUNK + 1]
        wrong = np.flatnonzero(starts[1:] < starts[:-1])
        if len(wrong):
            at = first + int(wrong[0])
            raise ValueError(
                f"{path} is damaged: document {at} begins at sequence {documents[at]} and ends at "
                f"{documents[at + 1]}"
            )


def _map(path: str) -> npt.NDArray[np.uint8]:
    """The bytes of a file, memory-mapped."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is no regular file")
            return map_file(file)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file; a named pipe too, at once, though nobody writes to it."""
    return os.open(path, flags | os.O_NONBLOCK)


def _offsets(lengths: IntArray, itemsize: int) -> npt.NDArray[np.int64]:
    """Byte offset of each sequence: the exclusive running sum of the lengths, in bytes."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return (ends - lengths) * itemsize


def _fitting(tokens: Tokens, dtype: np.dtype[np.generic], prefix: str) -> Tokens:
    if tokens.dtype == dtype or tokens.size == 0:
        return tokens.astype(dtype, copy=False)
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    low, high = int(tokens.min()), int(tokens.max())  # type: ignore[type-var]
    if low < limits.min or high > limits.max:
        raise ValueError(f"{prefix}: tokens from {low} to {high} do not fit {dtype}")
    return tokens.astype(dtype)


def open_locked(path: str, prefix: str) -> BinaryIO:
    """Opens the file of a writer, at its end, for one process at a time. Raises ValueError, naming
    the prefix, if another has it."""
    with ExitStack() as undo:
        file = undo.enter_context(open(path, "ab"))
        locked = lock_now(file)
        # Between the two lines above, another process may have finished and renamed this file.
        if locked is False or not is_at(file, path):
            raise ValueError(f"{prefix}: another process is writing this prefix")
        if locked is None:
            warnings.warn(
                f"{path} is on a file system without locks: let no other process write this prefix",
                stacklevel=3,
            )
        undo.pop_all()
        return file


def _blocks(file: BinaryIO, dtype: str, count: int) -> Iterator[IntArray]:
    """So many numbers of a file, from where it stands, BLOCK at a time. Raises ValueError if there
    are fewer."""
    for first in range(0, count, BLOCK):
        size = min(BLOCK, count - first)
        block = np.fromfile(file, dtype, size)
        if len(block) < size:
            raise ValueError(f"{file.name} was cut short by something else while it was written")
        yield block
