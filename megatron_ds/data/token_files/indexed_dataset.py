"""Reader and writer of Megatron's pair of token files, `.bin` and `.idx`, byte-compatible.

The `.bin` file holds the tokens of all sequences, concatenated. The `.idx` file, little-endian:

    offset       size  content
    0            9     magic `MMIDIDX` and two NULs
    9            8     uint64 version, 1
    17           1     uint8 dtype code
    18           8     uint64 n, number of sequences
    26           8     uint64 d, number of documents + 1
    34           4n    int32 length of each sequence in tokens
    34+4n        8n    int64 byte offset of each sequence in the `.bin`
    34+12n       8d    int64 index of the first sequence of each document; the last entry is n

Where only some tokens have a loss, such as the answers of conversations, a section of this package
follows, which Megatron does not read:

    34+12n+8d    8     magic `LOSSSPAN`
    +8           8     uint64 m, number of spans
    +16          16m   int64 first token of each span in the `.bin`, and token after its last one

This file knows no tokenizers, samples or torch.
"""

from __future__ import annotations

import itertools
import os
import stat
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_ds.config.data_files import read_table
from megatron_ds.config.problems import Problem, UserError, raise_if_any, user_error, warn_of
from megatron_ds.data.remote.token_cache import RemoteContent, RemoteTokens, TokenCache, is_url
from megatron_ds.data.token_files.file_formats import (
    LEGACY_MAGIC,
    MAGIC,
    is_index_without_documents,
)
from megatron_ds.data.token_files.missing_pair import (
    describe_other,
    other_format_problems,
)
from megatron_ds.data.token_files.token_file import IntArray, Tokens, probe, probed_slices
from megatron_ds.fileio.memory_map import map_file

VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
SPANS_HEADER = struct.Struct("<8sQ")
SPANS_MAGIC = b"LOSSSPAN"
DTYPES: dict[int, np.dtype[np.generic]] = {
    int(code): np.dtype(name) for code, name in read_table(__file__).items()
}
TOKENIZER_SUFFIX = ".tokenizer.json"
"""Suffix of the file that records which tokenizer made a pair."""
FAIRSEQ_TYPES = {9: " (fairseq: uint32)", 10: " (fairseq: uint64)"}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
UINT16_VOCAB = 65500
"""Vocabularies below this size are stored as uint16, as in Megatron."""
PROBED_DOCUMENTS = 1000
"""Documents whose last token is compared to recognize a pair that does not count its EODs."""
PROBED_REMOTE_DOCUMENTS = 32
"""The same for remote pairs, where reading a document may need a download."""
CHECKED_SEQUENCES = 1 << 20
"""Sequences checked at once, which bounds the memory for an index of any size."""
REMOTE_BLOCKS = 4
"""Blocks of a file by URL that are probed; reading one may be a download."""
MAX_INDEXES = 64
"""Indexes of a folder that are compared with a `.bin` whose own index does not describe it."""


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """Megatron's storage type for the tokens of a vocabulary: uint16 below 65,500, else int32."""
    return DTYPES[8] if vocab_size < UINT16_VOCAB else DTYPES[4]


def is_pair(path: str) -> bool:
    """Whether a path of this machine is the prefix of a pair .bin and .idx."""
    return Path(f"{path}.idx").is_file() and Path(f"{path}.bin").is_file()


class IndexedDataset:
    """The sequences of one pair of token files, memory-mapped. Implements `TokenFile`.

    Files that microsoft/Megatron-DeepSpeed wrote with --append-eod do not count the end-of-document
    tokens in their lengths. Such a pair is recognized and read with corrected lengths, with a
    warning.

    Args:
        prefix: Path or URL of the pair without `.bin` and `.idx`.
        cache: Where the files of a URL are; None for the cache in the default folder.

    Attributes:
        tokens_path: Path or URL of the `.bin`.
        index_path: The `.idx` on this machine.
        tokenizer_path: The `.tokenizer.json` on this machine, which the pair may not have.
        cache: Where the files of a URL are; None for a path.
        lengths: [n], tokens of each sequence.
        pointers: [n], byte offset of each sequence in the `.bin` file.
        sizes: Bytes of the `.bin` and of the `.idx`.
        tokens: All tokens of the file: one read-only array or, by URL, what reads like one.
        document_index: [d + 1], first sequence of each document, and n.
        loss_spans: [m, 2], the tokens with loss; None if all have one.

    Raises:
        UserError: If the files are missing, damaged or of another format.
    """

    file_names = ".bin and .idx"

    def __init__(self, prefix: str | os.PathLike[str], cache: TokenCache | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self.tokens_path = f"{self.prefix}.bin"
        self.cache = (cache or TokenCache()) if is_url(self.prefix) else None
        self.index_path = f"{prefix}.idx"
        self.tokenizer_path = f"{prefix}{TOKENIZER_SUFFIX}"
        content: npt.NDArray[np.uint8] | RemoteContent
        exists = os.path.exists if self.cache is None else self.cache.exists
        if not exists(f"{self.prefix}.idx"):
            raise_if_any(other_format_problems(self.prefix))
        if self.cache is None:
            index = _read_index(self.index_path, self.index_path)
            content = _map(self.tokens_path)
        else:
            pair = self.cache.open(self.prefix)
            self.index_path, self.tokenizer_path, content = pair
            index = _read_index(self.index_path, f"{prefix}.idx")
        self.dtype, self.lengths, self.pointers, self.document_index, self.loss_spans = index
        expected = _described_size(self.dtype, self.lengths, self.pointers)
        if content.size != expected and not self._count_missing_eod(content):
            raise user_error(
                "token-file-size-mismatch",
                prefix=self.prefix,
                size=content.size,
                expected=expected,
                reason=self._mismatch_reason(content.size),
            )
        self.content = content
        self.sizes: tuple[int, ...] = (content.size, os.path.getsize(self.index_path))
        self.tokens: Tokens | RemoteTokens = content.view(self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str, TokenCache | None]]:
        return IndexedDataset, (self.prefix, self.cache)

    @property
    def version(self) -> str:
        """Entity tag of a URL; empty for a path."""
        return self.content.file.version.tag if isinstance(self.content, RemoteContent) else ""

    def get(self, index: int) -> Tokens:
        """Tokens of a sequence, read-only."""
        start = int(self.pointers[index]) // self.dtype.itemsize
        tokens: Tokens = self.tokens[start : start + int(self.lengths[index])]
        return tokens

    def probe(self, blocks: int) -> Tokens:
        """All tokens of a small file; otherwise evenly spread blocks, of a URL at most
        REMOTE_BLOCKS."""
        tokens = self.tokens
        if isinstance(tokens, RemoteTokens):
            return probe(tokens, min(blocks, REMOTE_BLOCKS))
        slices = probed_slices(tokens.size, blocks)
        if slices == [slice(0, tokens.size)]:
            return tokens[:]
        item = self.dtype.itemsize
        # Mapped memory would be read ahead: with thousands of files, megabytes around each block.
        with open(self.tokens_path, "rb", buffering=0) as content:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            parts = [
                os.pread(content.fileno(), (part.stop - part.start) * item, part.start * item)
                for part in slices
            ]
        return np.frombuffer(b"".join(parts), dtype=self.dtype)

    def warm_up(self) -> None:
        """Read the token file once, to load it into the page cache; for a URL into its block cache,
        as far as it has room."""
        if isinstance(self.content, RemoteContent):
            self.content.warm_up()
            return
        with open(self.tokens_path, "rb", buffering=0) as file:
            buffer = bytearray(1 << 24)
            while file.readinto(buffer):
                pass

    def _mismatch_reason(self, size: int) -> str:
        """Why the files do not belong together, as far as their folder shows it.

        Args:
            size: Bytes of the `.bin`.
        """
        if self.cache is None:
            if description := describe_other(self.tokens_path):
                return f"the .bin is {description}, and the .idx is of another file"
            folder = Path(self.prefix).parent
            for path in itertools.islice(sorted(folder.glob("*.idx")), MAX_INDEXES):
                with suppress(UserError):
                    dtype, lengths, pointers, *_ = _read_index(str(path), str(path))
                    if _described_size(dtype, lengths, pointers) == size:
                        return f"the .idx is of another file; {path} describes a .bin of this size"
        return "the pair is incomplete, or its files belong to different runs"

    def _count_missing_eod(self, content: npt.NDArray[np.uint8] | RemoteContent) -> bool:
        """Corrects the lengths if exactly one EOD per document is not counted.

        Returns:
            Whether the pair is of that kind.
        """
        item = self.dtype.itemsize
        starts = self.document_index[:-1]
        ends = self.document_index[1:]
        last = ends[ends > starts] - 1
        lengths = np.array(self.lengths, dtype=np.int64)
        if content.size != (int(lengths.sum()) + len(last)) * item:
            return False
        lengths[last] += 1
        pointers = sequence_offsets(lengths, item)
        most = PROBED_DOCUMENTS if self.cache is None else PROBED_REMOTE_DOCUMENTS
        probed = last[:: max(1, len(last) // most)]
        finals = content.view(self.dtype)[pointers[probed] // item + lengths[probed] - 1]
        if len(np.unique(finals)) != 1:
            return False
        warning = Problem("eod-not-counted", prefix=self.prefix, eod=finals[0], count=len(last))
        warn_of(warning, 3)
        self.lengths = lengths.astype(np.int32)
        self.pointers = pointers
        return True


def _read_index(
    local_path: str, path: str
) -> tuple[np.dtype[np.generic], IntArray, IntArray, IntArray, IntArray | None]:
    """Reads an index: type of the tokens, lengths, pointers, documents and loss spans.

    Args:
        local_path: Where it is.
        path: Path or URL that messages name.
    """
    data = _map(local_path)
    head = data[: HEADER.size].tobytes()
    if head.startswith(LEGACY_MAGIC):
        raise user_error("legacy-token-file", path=path)
    if is_index_without_documents(head, data.size):
        raise user_error("token-index-without-documents", path=path)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        description = describe_other(local_path)
        ending = f"; it is {description}" if description else ""
        raise user_error("not-a-token-index", path=path, ending=ending)
    _, version, code, n, d = HEADER.unpack(head)
    if version != VERSION:
        raise user_error(
            "unknown-token-index-version", path=path, version=version, supported=VERSION
        )
    if code in (6, 7):
        raise user_error("floating-point-tokens", path=path, dtype_code=code)
    if code not in DTYPES:
        raise user_error(
            "unknown-token-dtype",
            path=path,
            dtype_code=code,
            name=FAIRSEQ_TYPES.get(code, ""),
            supported=sorted(DTYPES),
        )
    expected = HEADER.size + 12 * n + 8 * d
    has_spans = data[expected : expected + len(SPANS_MAGIC)].tobytes() == SPANS_MAGIC
    # Megatron-LM's multimodal files have one more byte per sequence, without a sign in the header.
    if not has_spans and data.size not in (expected, expected + n):
        raise user_error(
            "token-index-size-mismatch",
            path=path,
            size=data.size,
            expected=expected,
            sequences=n,
            documents=d - 1,
        )
    documents_at = HEADER.size + 12 * n
    lengths = data[HEADER.size : HEADER.size + 4 * n].view("<i4")
    pointers = data[HEADER.size + 4 * n : documents_at].view("<i8")
    documents = data[documents_at:expected].view("<i8")
    if d == 0 or int(documents[0]) != 0 or int(documents[-1]) != n:
        raise user_error("damaged-document-index", path=path, sequences=n)
    _check_order(path, lengths, pointers, documents, DTYPES[code].itemsize)
    tokens = int(lengths.sum(dtype=np.int64))
    spans = _read_spans(path, data[expected:], tokens) if has_spans else None
    return DTYPES[code], lengths, pointers, documents, spans


def _read_spans(path: str, section: npt.NDArray[np.uint8], tokens: int) -> IntArray:
    """Reads the loss spans of an index.

    Args:
        path: Path or URL that messages name.
        section: The last section of the index.
        tokens: Tokens of all sequences.

    Returns:
        [m, 2], first and end of each span.
    """
    size = SPANS_HEADER.size
    _, count = SPANS_HEADER.unpack(section[:size].tobytes().ljust(size))
    if section.size != size + 16 * count:
        raise user_error("damaged-loss-spans", path=path, tokens=tokens)
    edges: IntArray = section[size:].view("<i8")
    if count and (edges[0] < 0 or edges[-1] > tokens or bool((np.diff(edges) < 0).any())):
        raise user_error("damaged-loss-spans", path=path, tokens=tokens)
    return edges.reshape(-1, 2)


def _described_size(dtype: np.dtype[np.generic], lengths: IntArray, pointers: IntArray) -> int:
    """Bytes of the `.bin` that an index describes."""
    return int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize if len(lengths) else 0


def _check_order(
    path: str, lengths: IntArray, pointers: IntArray, documents: IntArray, itemsize: int
) -> None:
    """Checks that sequences are contiguous and documents in order.

    Raises:
        UserError: At the first entry that is not.
    """
    end = 0
    for first in range(0, len(lengths), CHECKED_SEQUENCES):
        sizes = lengths[first : first + CHECKED_SEQUENCES]
        if int(sizes.min()) < 0:
            at = first + int(sizes.argmin())
            raise user_error(
                "negative-sequence-length", path=path, sequence=at, lengths=lengths[at]
            )
        expected = sequence_offsets(sizes, itemsize) + end
        wrong = np.flatnonzero(expected != pointers[first : first + CHECKED_SEQUENCES])
        if len(wrong):
            at = first + int(wrong[0])
            raise user_error(
                "sequences-not-contiguous",
                path=path,
                sequence=at,
                pointers=pointers[at],
                expected=expected[wrong[0]],
            )
        end = int(expected[-1]) + int(sizes[-1]) * itemsize
    for first in range(0, len(documents) - 1, CHECKED_SEQUENCES):
        starts = documents[first : first + CHECKED_SEQUENCES + 1]
        wrong = np.flatnonzero(starts[1:] < starts[:-1])
        if len(wrong):
            at = first + int(wrong[0])
            raise user_error(
                "documents-not-in-order",
                path=path,
                document=at,
                begin=documents[at],
                end=documents[at + 1],
            )


def _map(path: str) -> npt.NDArray[np.uint8]:
    """Memory-maps a file.

    Raises:
        UserError: If it is missing, unreadable or not a regular file.
    """

    def open_nonblocking(path: str, flags: int) -> int:
        """Does not block on a named pipe without a writer."""
        return os.open(path, flags | os.O_NONBLOCK)

    try:
        with open(path, "rb", opener=open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise user_error("not-a-regular-file", path=path)
            return map_file(file)
    except FileNotFoundError:
        raise user_error("token-file-missing", path=path) from None
    except IsADirectoryError:
        raise user_error("token-file-is-a-folder", path=path) from None
    except OSError as error:
        raise user_error("token-file-unreadable", path=path, strerror=error.strerror) from error


def sequence_offsets(lengths: IntArray, itemsize: int) -> npt.NDArray[np.int64]:
    """Byte offset of each sequence: the exclusive cumulative sum of the lengths, in bytes."""
    ends = np.cumsum(lengths, dtype=np.int64)
    return (ends - lengths) * itemsize
