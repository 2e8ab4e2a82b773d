"""Statistics, integrity check and comparison of pairs of token files.

`IndexedDataset` already rejects a pair whose offsets are inconsistent. Knows no tokenizer and no
torch, and writes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import Problem, counted, user_error
from megatron_ds.data.token_files.indexed_dataset import (
    DTYPE_CODES,
    VERSION,
    IndexedDataset,
)
from megatron_ds.data.token_files.token_file import TokenFile, Tokens
from megatron_ds.fileio.atomic import sha256_of

BLOCK_TOKENS = 1 << 22
"""Tokens processed at once."""
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


@dataclass(frozen=True)
class LengthBin:
    """Number of documents with `low` to `high` tokens, and of their tokens."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Summary:
    """Header and index of a pair.

    Attributes:
        quantiles: Tokens of a document, by the quantiles of QUANTILES.
        histogram: Document lengths, one bin per power of two.
    """

    prefix: str
    version: int
    dtype: str
    dtype_code: int
    index_bytes: int
    token_bytes: int
    sequences: int
    documents: int
    tokens: int
    empty_documents: int
    shortest: int
    longest: int
    mean: float
    quantiles: dict[float, float]
    histogram: list[LengthBin]


@dataclass(frozen=True)
class IntegrityReport:
    """Result of reading every token. `lowest` and `highest` are None without tokens."""

    problems: list[Problem]
    lowest: int | None
    highest: int | None
    documents_ending_with_eod: int | None
    sha256_bin: str
    sha256_idx: str


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of two pairs.

    Attributes:
        description: Message; empty if the pairs have the same content.
        document: First document that differs.
        token: First token of it that differs; None if only its sequence boundaries differ.
    """

    description: str
    document: int | None = None
    token: int | None = None


def document_starts(data: TokenFile) -> npt.NDArray[np.int64]:
    """Position in `data.tokens` at which each document begins, and the end, [documents + 1]."""
    ends = np.zeros(len(data) + 1, dtype=np.int64)
    np.cumsum(data.lengths, out=ends[1:])
    return ends[data.document_index]


def document(data: TokenFile, index: int) -> Tokens:
    """All tokens of a document.

    Raises:
        UserError: If the pair has no document of this number.
    """
    count = len(data.document_index) - 1
    if not 0 <= index < count:
        raise user_error("no-such-document", prefix=data.prefix, number=index, count=count - 1)
    first, end = (int(at) for at in data.document_index[index : index + 2])
    begin = int(data.pointers[first]) // data.dtype.itemsize if first < end else 0
    size = int(data.lengths[first:end].sum(dtype=np.int64))
    tokens: Tokens = data.tokens[begin : begin + size]
    return tokens


def summarize(data: IndexedDataset) -> Summary:
    """Summarizes header and index; reads no tokens."""
    lengths = np.diff(document_starts(data))
    measured = lengths if lengths.size else np.zeros(1, np.int64)
    return Summary(
        prefix=data.prefix,
        version=VERSION,
        dtype=str(data.dtype),
        dtype_code=DTYPE_CODES[data.dtype],
        index_bytes=data.sizes[1],
        token_bytes=data.sizes[0],
        sequences=len(data),
        documents=lengths.size,
        tokens=data.tokens.size,
        empty_documents=int((lengths == 0).sum()),
        shortest=int(measured.min()),
        longest=int(measured.max()),
        mean=float(measured.mean()),
        quantiles=dict(zip(QUANTILES, np.quantile(measured, QUANTILES).tolist(), strict=True)),
        histogram=_histogram(lengths),
    )


def _histogram(lengths: npt.NDArray[np.int64]) -> list[LengthBin]:
    """Bins 0, 1, 2-3, 4-7, ..., from the first to the last that is not empty."""
    powers = np.frexp(lengths.astype(np.float64))[1]  # 0 for 0, k + 1 for 2^k to 2^(k+1) - 1
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths)
    filled = np.flatnonzero(counts)
    return [
        LengthBin((1 << power) >> 1, (1 << power) - 1, int(counts[power]), int(tokens[power]))
        for power in (range(filled[0], filled[-1] + 1) if filled.size else ())
    ]


def check(
    data: IndexedDataset, vocab_size: int | None = None, eod: int | None = None
) -> IntegrityReport:
    """Reads every token and checks it against the vocabulary.

    Offsets and lengths were checked when the pair was opened.

    Args:
        data: The pair.
        vocab_size: Vocabulary size of the tokenizer; None if unknown.
        eod: Its end-of-document token; None if unknown.
    """
    limit = vocab_size if vocab_size is not None else int(np.iinfo(np.int64).max)
    problems: list[Problem] = []
    outside = 0
    first_outside = -1
    lows = []
    highs = []
    sha256 = hashlib.sha256()
    for start in range(0, data.tokens.size, BLOCK_TOKENS):
        stored = data.tokens[start : start + BLOCK_TOKENS]
        sha256.update(stored.view(np.uint8).data)
        block = stored.astype(np.int64)
        lows.append(int(block.min()))
        highs.append(int(block.max()))
        wrong = np.flatnonzero((block < 0) | (block >= limit))
        if wrong.size and not outside:
            first_outside = start + int(wrong[0])
        outside += wrong.size
    if outside:
        at = int(np.searchsorted(document_starts(data), first_outside, side="right")) - 1
        size = "" if vocab_size is None else f" of {vocab_size}"
        problems.append(
            Problem(
                "tokens-outside-vocabulary",
                prefix=data.prefix,
                outside=outside,
                size=size,
                tokens=data.tokens[first_outside],
                at=at,
            )
        )
    return IntegrityReport(
        problems=problems,
        lowest=min(lows, default=None),
        highest=max(highs, default=None),
        documents_ending_with_eod=None if eod is None else _count_eod_endings(data, eod),
        sha256_bin=sha256.hexdigest(),
        sha256_idx=sha256_of(data.index_path),
    )


def _count_eod_endings(data: IndexedDataset, eod: int) -> int:
    starts = document_starts(data)
    last = starts[1:][starts[1:] > starts[:-1]] - 1
    return sum(
        int((data.tokens[last[at : at + BLOCK_TOKENS]] == eod).sum())
        for at in range(0, last.size, BLOCK_TOKENS)
    )


def compare(left: TokenFile, right: TokenFile) -> FirstDifference:
    """Finds the first difference of two pairs in documents, tokens or sequence boundaries.

    The dtype of the tokens is not compared. Tokens are compared in blocks.
    """
    starts = document_starts(left)
    left_sizes = np.diff(starts)
    right_sizes = np.diff(document_starts(right))
    documents = min(left_sizes.size, right_sizes.size)
    at = _first_mismatch(left_sizes, right_sizes)
    shorter = 0 if at is None else int(min(left_sizes[at], right_sizes[at]))
    # Tokens of the documents before it, which have equal lengths, and its own.
    common = int(starts[documents if at is None else at]) + shorter
    token = _first_mismatch(left.tokens[:common], right.tokens[:common])
    if token is not None:
        index = int(np.searchsorted(starts, token, side="right")) - 1
        within = token - int(starts[index])
        return FirstDifference(
            f"token {within} of document {index} is {left.tokens[token]} in {left.prefix} and "
            f"{right.tokens[token]} in {right.prefix}",
            index,
            within,
        )
    if at is not None:
        return FirstDifference(
            f"document {at} has {counted(left_sizes[at], 'token')} in {left.prefix} and "
            f"{right_sizes[at]} in {right.prefix}; the tokens of the shorter one are equal",
            at,
            shorter,
        )
    if left_sizes.size != right_sizes.size:
        ended, longer = sorted((left, right), key=lambda data: len(data.document_index))
        description = (
            f"{ended.prefix} ends after {counted(documents, 'document')}, {longer.prefix} has more"
        )
        return FirstDifference(description, documents, 0)
    return _first_boundary_difference(left, right)


def _first_boundary_difference(left: TokenFile, right: TokenFile) -> FirstDifference:
    """Compares the sequence boundaries of pairs with equal documents and tokens."""
    sequence = _first_mismatch(left.lengths, right.lengths)
    if sequence is None and len(left) == len(right):
        entry = _first_mismatch(left.document_index, right.document_index)
        if entry is None:
            return FirstDifference("")
        index = entry - 1
    else:
        at = min(len(left), len(right)) - 1 if sequence is None else sequence
        index = int(np.searchsorted(left.document_index, at, side="right")) - 1
    return FirstDifference(
        f"the tokens are equal, but document {index} is split into different sequences", index
    )


def _first_mismatch(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> int | None:
    """First index of the common length at which two arrays differ."""
    size = min(left.size, right.size)
    for start in range(0, size, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, size)
        wrong = np.flatnonzero(left[start:end] != right[start:end])
        if wrong.size:
            return start + int(wrong[0])
    return None


def summary_lines(summary: Summary) -> Iterator[str]:
    """Lines of text with the summary and a histogram."""
    yield f"{summary.prefix}"
    yield (
        f"  format: MMIDIDX, version {summary.version}, tokens {summary.dtype} "
        f"(code {summary.dtype_code})"
    )
    yield f"  files: .idx {summary.index_bytes:,} bytes, .bin {summary.token_bytes:,} bytes"
    yield (
        f"  content: {counted(summary.documents, 'document', ',')} "
        f"({summary.empty_documents:,} empty), {counted(summary.sequences, 'sequence', ',')}, "
        f"{counted(summary.tokens, 'token', ',')}"
    )
    quantiles = ", ".join(f"{q:.0%} {value:,.0f}" for q, value in summary.quantiles.items())
    yield (
        f"  tokens per document: {summary.shortest:,} to {summary.longest:,}, "
        f"mean {summary.mean:,.1f}; quantiles {quantiles}"
    )
    most = max((row.documents for row in summary.histogram), default=0)
    for row in summary.histogram:
        span = f"{row.low:,}" if row.low == row.high else f"{row.low:,}-{row.high:,}"
        bar = "#" * -(-40 * row.documents // most)
        counts = f"{row.documents:>13,} documents {row.tokens:>16,} tokens"
        yield f"  {span:>25} {counts} {bar}".rstrip()
