"""What a pair of token files holds: counts, lengths, integrity, and where two pairs part.

Reads through `IndexedDataset`, which itself refuses a pair whose offsets do not fit. Knows no
tokenizer and no torch, and writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed_dataset import CODES, VERSION, IndexedDataset, Tokens
from megatron_ds.fileio.atomic import sha256_of

BLOCK = 1 << 22
"""Tokens that are looked at together."""
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


@dataclass(frozen=True)
class LengthBin:
    """Documents of `low` to `high` tokens, and the tokens in them."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Summary:
    """A pair's header and what its index counts.

    quantiles: tokens of a document at each of QUANTILES. histogram: one bin per power of two.
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
    """What reading every token told. lowest, highest: None in a pair without tokens."""

    problems: list[str]
    lowest: int | None
    highest: int | None
    documents_ending_with_eod: int | None
    sha256_bin: str
    sha256_idx: str


@dataclass(frozen=True)
class FirstDifference:
    """Where two pairs part for the first time.

    what: in words; empty for pairs that hold the same. document: the first that is not the same in
    both. token: the place in it; None if it begins with a cut into other sequences alone.
    """

    what: str
    document: int | None = None
    token: int | None = None


def document_lengths(data: IndexedDataset) -> npt.NDArray[np.int64]:
    """Tokens of each document, [number of documents]."""
    return np.diff(document_starts(data))


def document_starts(data: IndexedDataset) -> npt.NDArray[np.int64]:
    """Where in `data.tokens` each document begins, and where the last one ends, [documents + 1]."""
    ends = np.zeros(len(data) + 1, dtype=np.int64)
    np.cumsum(data.lengths, out=ends[1:])
    return ends[data.document_index]


def document(data: IndexedDataset, number: int) -> Tokens:
    """All tokens of a document, its sequences back to back. Raises ValueError if there is none."""
    count = len(data.document_index) - 1
    if not 0 <= number < count:
        raise ValueError(f"{data.prefix}: there is no document {number}; it has {count}, from 0 on")
    first, end = (int(at) for at in data.document_index[number : number + 2])
    if first == end:
        return data.tokens[:0]
    begin = int(data.pointers[first]) // data.dtype.itemsize
    return data.tokens[begin : begin + int(data.lengths[first:end].sum(dtype=np.int64))]


def summarize(data: IndexedDataset) -> Summary:
    lengths = document_lengths(data)
    some = lengths.size > 0
    quantiles = np.quantile(lengths, QUANTILES) if some else np.zeros(len(QUANTILES))
    return Summary(
        prefix=data.prefix,
        version=VERSION,
        dtype=str(data.dtype),
        dtype_code=CODES[data.dtype],
        index_bytes=os.path.getsize(data.prefix + ".idx"),
        token_bytes=os.path.getsize(data.prefix + ".bin"),
        sequences=len(data),
        documents=lengths.size,
        tokens=data.tokens.size,
        empty_documents=int((lengths == 0).sum()),
        shortest=int(lengths.min()) if some else 0,
        longest=int(lengths.max()) if some else 0,
        mean=float(lengths.mean()) if some else 0.0,
        quantiles=dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
        histogram=_histogram(lengths),
    )


def _histogram(lengths: npt.NDArray[np.int64]) -> list[LengthBin]:
    """Bins 0, 1, 2-3, 4-7, ...: from the first that has documents to the last."""
    powers = np.frexp(lengths.astype(np.float64))[1]  # 0 has 0; 2^k to 2^(k+1) - 1 have k + 1
    counts = np.bincount(powers)
    tokens = np.bincount(powers, weights=lengths)
    filled = np.flatnonzero(counts)
    return [
        LengthBin(
            (1 << power) >> 1, max(0, (1 << power) - 1), int(counts[power]), int(tokens[power])
        )
        for power in (range(filled[0], filled[-1] + 1) if filled.size else ())
    ]


def check(
    data: IndexedDataset, vocab_size: int | None = None, eod: int | None = None
) -> IntegrityReport:
    """Read every token. vocab_size, eod: of the tokenizer, if it is known.

    A problem is what training would stumble over: tokens outside of the vocabulary. That the
    offsets fit was proven when the pair was opened.
    """
    limit = vocab_size if vocab_size is not None else int(np.iinfo(np.int64).max)
    problems: list[str] = []
    outside, first_outside = 0, -1
    lows, highs = [], []
    for start in range(0, data.tokens.size, BLOCK):
        block = data.tokens[start : start + BLOCK].astype(np.int64)
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
            f"{data.prefix}: {outside} tokens are outside of the vocabulary{size}; the first is "
            f"{data.tokens[first_outside]}, in document {at}: the file is damaged, or made with "
            "another tokenizer"
        )
    return IntegrityReport(
        problems=problems,
        lowest=min(lows, default=None),
        highest=max(highs, default=None),
        documents_ending_with_eod=None if eod is None else _ending_with(data, eod),
        sha256_bin=sha256_of(data.prefix + ".bin"),
        sha256_idx=sha256_of(data.prefix + ".idx"),
    )


def _ending_with(data: IndexedDataset, eod: int) -> int:
    starts = document_starts(data)
    last = starts[1:][starts[1:] > starts[:-1]] - 1
    return sum(
        int((data.tokens[last[at : at + BLOCK]] == eod).sum()) for at in range(0, last.size, BLOCK)
    )


def compare(left: IndexedDataset, right: IndexedDataset) -> FirstDifference:
    """The first difference of two pairs in what they hold; the type of the tokens is no part of it.

    Tokens are compared in blocks.
    """
    starts, others = document_starts(left), document_starts(right)
    ours, theirs = np.diff(starts), np.diff(others)
    both = min(ours.size, theirs.size)
    unlike = np.flatnonzero(ours[:both] != theirs[:both])
    at = int(unlike[0]) if unlike.size else both
    common = int(starts[at])  # tokens of the documents before, of the same length in both
    if unlike.size:
        common += int(min(ours[at], theirs[at]))
    token = _first_unlike(left.tokens[:common], right.tokens[:common])
    if token is not None:
        found = int(np.searchsorted(starts, token, side="right")) - 1
        within = token - int(starts[found])
        return FirstDifference(
            f"token {within} of document {found} is {left.tokens[token]} in {left.prefix} and "
            f"{right.tokens[token]} in {right.prefix}",
            found,
            within,
        )
    if unlike.size:
        return FirstDifference(
            f"document {at} has {ours[at]} tokens in {left.prefix} and {theirs[at]} in "
            f"{right.prefix}; all of the shorter one are the same",
            at,
            int(min(ours[at], theirs[at])),
        )
    if ours.size != theirs.size:
        longer, shorter = (left, right) if ours.size > theirs.size else (right, left)
        return FirstDifference(
            f"{longer.prefix} goes on where {shorter.prefix} ends, after {both} documents", both, 0
        )
    cut = _first_unlike(left.lengths, right.lengths)
    if cut is None and len(left) == len(right):
        cut = _first_unlike(left.document_index, right.document_index)
        if cut is None:
            return FirstDifference("")
        found = cut - 1
    else:
        sequence = min(len(left), len(right)) - 1 if cut is None else cut
        found = int(np.searchsorted(left.document_index, sequence, side="right")) - 1
    return FirstDifference(
        f"the tokens are the same, but document {found} is cut into other sequences", found
    )


def _first_unlike(left: npt.NDArray[np.generic], right: npt.NDArray[np.generic]) -> int | None:
    """The first place of the common length at which two arrays differ."""
    for start in range(0, min(left.size, right.size), BLOCK):
        a, b = left[start : start + BLOCK], right[start : start + BLOCK]
        size = min(a.size, b.size)
        wrong = np.flatnonzero(a[:size] != b[:size])
        if wrong.size:
            return start + int(wrong[0])
    return None


def summary_lines(summary: Summary) -> Iterator[str]:
    """The summary as text, with the histogram drawn in characters."""
    yield f"{summary.prefix}"
    yield (
        f"  format: MMIDIDX, version {summary.version}, tokens {summary.dtype} "
        f"(code {summary.dtype_code})"
    )
    yield f"  files: .idx {summary.index_bytes:,} bytes, .bin {summary.token_bytes:,} bytes"
    yield (
        f"  holds: {summary.documents:,} documents ({summary.empty_documents:,} empty), "
        f"{summary.sequences:,} sequences, {summary.tokens:,} tokens"
    )
    shares = ", ".join(f"{share:.0%} {value:,.0f}" for share, value in summary.quantiles.items())
    yield (
        f"  tokens per document: {summary.shortest:,} to {summary.longest:,}, "
        f"mean {summary.mean:,.1f}; quantiles {shares}"
    )
    most = max((part.documents for part in summary.histogram), default=0)
    for part in summary.histogram:
        span = f"{part.low:,}" if part.low == part.high else f"{part.low:,}-{part.high:,}"
        bar = "#" * -(-40 * part.documents // most)
        counts = f"{part.documents:>13,} documents {part.tokens:>16,} tokens"
        yield f"  {span:>25} {counts} {bar}".rstrip()
