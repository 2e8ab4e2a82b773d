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

import mmap
import os
import stat
import struct
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_ds.data.lock import is_at, lock_now

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
MADE_BY = ".tokenizer.json"
"""End of the name of the file beside a pair that says which tokenizer made it."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
UINT16_VOCAB = 65500
"""Vocabularies below this are written as uint16, as in every Megatron."""
DOCUMENTS_PROBED = 1000
CHUNK = 1 << 20
"""Sequences that are checked at once: memory stays flat, whatever the size of the index."""

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


class IndexedWriter:
    """Writes a `.bin/.idx` pair that appears under its name only when it is complete.

    Use as a context manager, or call `finalize()`; leaving the `with` block by an exception removes
    what was written. A killed run leaves `<prefix>.bin.partial`, which the next one overwrites.
    made_by: what the file beside the pair is to say of the tokenizer; one of an older pair goes.
    Raises ValueError if another process is writing the same prefix, or if a token does not fit the
    dtype.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        made_by: bytes | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self._made_by = made_by
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ValueError(
                f"{self.prefix}: tokens cannot be stored as {self.dtype}; valid: "
                f"{', '.join(str(d) for d in CODES)}"
            )
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._documents: list[npt.NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._count = 0
        self._complete = False
        self._bin: BinaryIO | None = _open_locked(self.prefix)

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append one document of one sequence. tokens: [length] integers."""
        array = np.asarray(tokens)
        self.add_documents(array, np.array([array.size]))

    def add_documents(self, tokens: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Append documents of one sequence each. tokens: [sum of lengths] integers, back to back;
        lengths: [n]."""
        array, sizes = np.asarray(tokens), np.asarray(lengths, dtype=np.int64)
        if int(sizes.sum()) != array.size:
            raise ValueError(
                f"{self.prefix}: {array.size} tokens do not make documents of {sizes.sum()}"
            )
        if sizes.size and int(sizes.max()) > np.iinfo(np.int32).max:
            raise ValueError(f"{self.prefix}: a document of {sizes.max()} tokens is too long")
        assert self._bin is not None, "the pair was already finished"
        with _naming(self.prefix + ".bin.partial"):
            self._bin.write(_fitting(array, self.dtype, self.prefix).tobytes())
        self._lengths.append(sizes.astype("<i4"))
        self._documents.append(np.arange(self._count + 1, self._count + 1 + sizes.size))
        self._count += sizes.size

    def add_dataset(self, data: IndexedDataset) -> None:
        """Append all sequences and documents of another pair of the same dtype."""
        if data.dtype != self.dtype:
            raise ValueError(f"{data.prefix} holds {data.dtype}, not {self.dtype}")
        assert self._bin is not None, "the pair was already finished"
        with _naming(self.prefix + ".bin.partial"):
            for first in range(0, data.tokens.size, CHUNK):
                self._bin.write(data.tokens[first : first + CHUNK].tobytes())
        # A copy: a view keeps the file of every pair open.
        self._lengths.append(np.array(data.lengths, dtype="<i4"))
        self._documents.append(data.document_index[1:].astype(np.int64) + self._count)
        self._count += len(data)

    def complete(self) -> None:
        """Flush both files to disk, which may fail or take long, and leave them without names."""
        assert self._bin is not None, "the pair was already finished"
        with _naming(self.prefix + ".bin.partial"):
            _sync(self._bin)
        partial_index = self.prefix + ".idx.partial"
        with _naming(partial_index), open(partial_index, "wb") as file:
            self._write_index(file)
            _sync(file)
        partial_made_by = f"{self.prefix}{MADE_BY}.partial"
        if self._made_by is not None:
            with _naming(partial_made_by), open(partial_made_by, "wb") as file:
                file.write(self._made_by)
                _sync(file)
        self._complete = True

    def finalize(self) -> None:
        """Flush both files to disk, then give them their names, the index last."""
        if not self._complete:
            self.complete()
        assert self._bin is not None, "the pair was already finished"
        # What describes older tokens must not stand beside the new ones, not even for a moment.
        for suffix in (".idx", MADE_BY):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        if self._made_by is not None:
            os.replace(f"{self.prefix}{MADE_BY}.partial", self.prefix + MADE_BY)
        os.replace(self.prefix + ".bin.partial", self.prefix + ".bin")
        os.replace(self.prefix + ".idx.partial", self.prefix + ".idx")
        self._bin.close()
        self._bin = None
        sync_folder(os.path.dirname(self.prefix) or ".")

    def abort(self) -> None:
        """Remove what was written."""
        if self._bin is None:
            return
        for suffix in (".bin.partial", ".idx.partial", f"{MADE_BY}.partial"):
            Path(self.prefix + suffix).unlink(missing_ok=True)
        with suppress(OSError):  # what the disk has no room for is not wanted any more
            self._bin.close()
        self._bin = None

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._bin is not None:
                self.finalize()
        finally:
            self.abort()

    def _write_index(self, file: BinaryIO) -> None:
        lengths = np.concatenate([np.zeros(0, np.dtype("<i4")), *self._lengths])
        documents = np.concatenate(self._documents)
        file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], lengths.size, documents.size))
        file.write(lengths.tobytes())
        file.write(_offsets(lengths, self.dtype.itemsize).astype("<i8").tobytes())
        file.write(documents.astype("<i8").tobytes())


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make renames inside a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """The bytes of a file, memory-mapped. A plain array: slices of np.memmap are slow to make."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is no regular file")
            if status.st_size == 0:
                return np.zeros(0, np.uint8)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder, not a file") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return np.frombuffer(content, dtype=np.uint8)


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


def _open_locked(prefix: str) -> BinaryIO:
    path = prefix + ".bin.partial"
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
        file.truncate(0)
        undo.pop_all()
        return file


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Gives its file's name to an error that has none, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, path) from None


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
