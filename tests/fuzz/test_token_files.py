"""Damaged pairs of token files are rejected, or read as they were written."""

from __future__ import annotations

import os
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.config.problems import UserError
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.data.indexed_writer import IndexedWriter
from megatron_ds.data.sample_index import build_indexes
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, REJECTED, read_or_error
from tests.problems import raises_problem

DOCUMENTS = [[5, 6, 7], [], [1], [65000, 2, 3, 4], [9, 9]]
COUNT = len(DOCUMENTS)
VERSION_AT, CODE_AT, N_AT, D_AT, LENGTHS_AT = 9, 17, 18, 26, 34
POINTERS_AT = LENGTHS_AT + 4 * COUNT
DOCUMENTS_AT = LENGTHS_AT + 12 * COUNT
VOCABULARY = 65400


class Pair(NamedTuple):
    idx: bytes
    bin: bytes

    def change(self, offset: int, layout: str, *values: int) -> Pair:
        """Overwrites numbers from a byte of the index on."""
        content = struct.pack("<" + layout, *values)
        return self._replace(idx=self.idx[:offset] + content + self.idx[offset + len(content) :])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def good(folder: Path) -> Pair:
    with IndexedWriter(folder / "good", "uint16") as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return Pair((folder / "good.idx").read_bytes(), (folder / "good.bin").read_bytes())


def samples(folder: Path, pair: Pair) -> list[list[int]]:
    """All samples of a pair."""
    (folder / "p.idx").write_bytes(pair.idx)
    (folder / "p.bin").write_bytes(pair.bin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = IndexedDataset(folder / "p")
    indexes = build_indexes(data.lengths, np.arange(len(data)), 5, 3, 1)
    dataset = GPTDataset(data, indexes, 3, VOCABULARY)
    return [dataset[number].tolist() for number in range(len(dataset))]


def read(folder: Path, pair: Pair) -> object:
    """All samples of a pair, or REJECTED."""
    return read_or_error(lambda: samples(folder, pair), str(folder / "p"))


DAMAGES: dict[str, tuple[Callable[[Pair], Pair], str]] = {
    "empty index": (lambda p: p._replace(idx=b""), "not-a-token-index"),
    "only the magic": (lambda p: p._replace(idx=p.idx[:9]), "not-a-token-index"),
    "only the header": (lambda p: p._replace(idx=p.idx[:34]), "token-index-size-mismatch"),
    "header cut": (lambda p: p._replace(idx=p.idx[:33]), "not-a-token-index"),
    "another magic": (lambda p: p._replace(idx=b"PK\3\4" + p.idx[4:]), "not-a-token-index"),
    "text": (lambda p: p._replace(idx=b"once upon a time " * 9), "not-a-token-index"),
    "the lazy format": (lambda p: p._replace(idx=b"TNTIDX\0\0" + p.idx), "legacy-token-file"),
    "version 0": (lambda p: p.change(VERSION_AT, "Q", 0), "unknown-token-index-version"),
    "version 2": (lambda p: p.change(VERSION_AT, "Q", 2), "unknown-token-index-version"),
    "big-endian version": (
        lambda p: p.change(VERSION_AT, "Q", 1 << 56),
        "unknown-token-index-version",
    ),
    "dtype code 0": (lambda p: p.change(CODE_AT, "B", 0), "unknown-token-dtype"),
    "dtype code 6": (lambda p: p.change(CODE_AT, "B", 6), "floating-point-tokens"),
    "dtype code 7": (lambda p: p.change(CODE_AT, "B", 7), "floating-point-tokens"),
    "dtype code 9": (lambda p: p.change(CODE_AT, "B", 9), "unknown-token-dtype"),
    "dtype code 255": (lambda p: p.change(CODE_AT, "B", 255), "unknown-token-dtype"),
    "narrower dtype": (lambda p: p.change(CODE_AT, "B", 1), "sequences-not-contiguous"),
    "wider dtype": (lambda p: p.change(CODE_AT, "B", 4), "sequences-not-contiguous"),
    "signed dtype": (lambda p: p.change(CODE_AT, "B", 3), "sample-token-outside-vocabulary"),
    "no sequences": (lambda p: p.change(N_AT, "Q", 0), "token-index-size-mismatch"),
    "one more sequence": (lambda p: p.change(N_AT, "Q", COUNT + 1), "token-index-size-mismatch"),
    "2^31 sequences": (lambda p: p.change(N_AT, "Q", 1 << 31), "token-index-size-mismatch"),
    "2^64 - 1 sequences": (
        lambda p: p.change(N_AT, "Q", (1 << 64) - 1),
        "token-index-size-mismatch",
    ),
    "sequences that overflow": (
        lambda p: p.change(N_AT, "Q", (1 << 62) + COUNT),
        "token-index-size-mismatch",
    ),
    "no documents": (lambda p: p.change(D_AT, "Q", 0), "token-index-size-mismatch"),
    "2^64 - 1 documents": (
        lambda p: p.change(D_AT, "Q", (1 << 64) - 1),
        "token-index-size-mismatch",
    ),
    "counts exchanged": (
        lambda p: p.change(N_AT, "QQ", COUNT + 1, COUNT),
        "token-index-size-mismatch",
    ),
    "no counts at all": (
        lambda p: p._replace(idx=p.change(N_AT, "QQ", 0, 0).idx[:34]),
        "damaged-document-index",
    ),
    "a negative length": (lambda p: p.change(LENGTHS_AT, "i", -3), "negative-sequence-length"),
    "a length too long": (lambda p: p.change(LENGTHS_AT, "i", 4), "sequences-not-contiguous"),
    "a huge length": (
        lambda p: p.change(LENGTHS_AT, "i", (1 << 31) - 1),
        "sequences-not-contiguous",
    ),
    "a length of 0": (lambda p: p.change(LENGTHS_AT, "i", 0), "sequences-not-contiguous"),
    "the last length too long": (
        lambda p: p.change(POINTERS_AT - 4, "i", 3),
        "token-file-size-mismatch",
    ),
    "the last length too short": (
        lambda p: p.change(POINTERS_AT - 4, "i", 1),
        "token-file-size-mismatch",
    ),
    "the last length negative": (
        lambda p: p.change(POINTERS_AT - 4, "i", -1),
        "negative-sequence-length",
    ),
    "the last length huge": (
        lambda p: p.change(POINTERS_AT - 4, "i", 1 << 30),
        "token-file-size-mismatch",
    ),
    "lengths exchanged": (lambda p: p.change(LENGTHS_AT, "ii", 0, 3), "sequences-not-contiguous"),
    "first pointer not 0": (lambda p: p.change(POINTERS_AT, "q", 2), "sequences-not-contiguous"),
    "a negative pointer": (lambda p: p.change(POINTERS_AT, "q", -2), "sequences-not-contiguous"),
    "an odd pointer": (lambda p: p.change(POINTERS_AT + 8, "q", 5), "sequences-not-contiguous"),
    "a pointer beyond the tokens": (
        lambda p: p.change(POINTERS_AT + 24, "q", 1 << 40),
        "sequences-not-contiguous",
    ),
    "a pointer that overflows": (
        lambda p: p.change(POINTERS_AT + 32, "q", (1 << 63) - 1),
        "sequences-not-contiguous",
    ),
    "pointers backwards": (
        lambda p: p.change(POINTERS_AT + 16, "qq", 8, 6),
        "sequences-not-contiguous",
    ),
    "all pointers 0": (
        lambda p: p.change(POINTERS_AT, f"{COUNT}q", *[0] * COUNT),
        "sequences-not-contiguous",
    ),
    "pointers in tokens": (
        lambda p: p.change(POINTERS_AT, f"{COUNT}q", 0, 3, 3, 4, 8),
        "sequences-not-contiguous",
    ),
    "documents begin at 1": (lambda p: p.change(DOCUMENTS_AT, "q", 1), "damaged-document-index"),
    "documents end early": (
        lambda p: p.change(DOCUMENTS_AT + 8 * COUNT, "q", COUNT - 1),
        "damaged-document-index",
    ),
    "documents end late": (
        lambda p: p.change(DOCUMENTS_AT + 8 * COUNT, "q", 99),
        "damaged-document-index",
    ),
    "documents backwards": (
        lambda p: p.change(DOCUMENTS_AT + 8, "qq", 3, 1),
        "documents-not-in-order",
    ),
    "a negative document": (
        lambda p: p.change(DOCUMENTS_AT + 8, "q", -1),
        "documents-not-in-order",
    ),
    "a document beyond the end": (
        lambda p: p.change(DOCUMENTS_AT + 8, "q", 1 << 50),
        "documents-not-in-order",
    ),
    "one byte more in the index": (
        lambda p: p._replace(idx=p.idx + b"\0"),
        "token-index-size-mismatch",
    ),
    "no tokens": (lambda p: p._replace(bin=b""), "token-file-size-mismatch"),
    "one byte of tokens less": (lambda p: p._replace(bin=p.bin[:-1]), "token-file-size-mismatch"),
    "one byte of tokens more": (
        lambda p: p._replace(bin=p.bin + b"\0"),
        "token-file-size-mismatch",
    ),
    "one token more": (lambda p: p._replace(bin=p.bin + b"\0\0"), "token-file-size-mismatch"),
    "another's tokens": (lambda p: p._replace(bin=p.bin * 2), "token-file-size-mismatch"),
    "one EOD per document, not the same": (
        lambda p: p._replace(bin=p.bin + bytes(range(2 * COUNT))),
        "token-file-size-mismatch",
    ),
    "tokens beyond the vocabulary": (
        lambda p: p._replace(bin=b"\xff\xff" + p.bin[2:]),
        "sample-token-outside-vocabulary",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_pair_is_rejected(tmp_path: Path, good: Pair, name: str) -> None:
    damage, code = DAMAGES[name]
    with raises_problem(code, contains=str(tmp_path / "p")):
        samples(tmp_path, damage(good))


def test_undamaged_pair_is_read(folder: Path, good: Pair) -> None:
    samples = read(folder, good)
    assert isinstance(samples, list)
    assert {token for sample in samples for token in sample} <= {1, 2, 3, 4, 5, 6, 7, 9, 65000}


def test_truncation_at_every_byte_is_rejected(folder: Path, good: Pair) -> None:
    for size in range(len(good.idx)):
        assert read(folder, good._replace(idx=good.idx[:size])) is REJECTED, size
    for size in range(len(good.bin)):
        assert read(folder, good._replace(bin=good.bin[:size])) is REJECTED, size


def test_every_flipped_bit_of_the_index_is_found_or_harmless(folder: Path, good: Pair) -> None:
    expected = read(folder, good)
    harmless = []
    for bit in range(8 * len(good.idx)):
        damaged = bytearray(good.idx)
        damaged[bit // 8] ^= 1 << bit % 8
        result = read(folder, good._replace(idx=bytes(damaged)))
        if result is not REJECTED:
            assert result == expected, bit
            harmless.append(bit // 8)
    # Document boundaries do not affect samples.
    assert all(at >= DOCUMENTS_AT for at in harmless)


@given(
    code=st.integers(0, 255),
    version=st.integers(0, 2),
    counts=st.tuples(*[st.integers(0, 12) | st.integers(0, (1 << 64) - 1)] * 2),
    rest=st.binary(max_size=120),
)
@FUZZ_SETTINGS
def test_random_header_is_rejected(
    folder: Path, code: int, version: int, counts: tuple[int, int], rest: bytes
) -> None:
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, *counts)
    assert read(folder, Pair(header + rest, b"\1\0" * 10)) is REJECTED


@given(
    edits=st.lists(
        st.tuples(
            st.sampled_from("iqQ"),
            st.integers(CODE_AT, DOCUMENTS_AT + 8 * COUNT),
            st.integers(-3, 12) | st.integers(-(1 << 31), (1 << 31) - 1),
        ),
        min_size=1,
        max_size=3,
    )
)
@FUZZ_SETTINGS
def test_changed_numbers_are_found_or_harmless(
    folder: Path, good: Pair, edits: list[tuple[str, int, int]]
) -> None:
    pair = good
    for layout, offset, value in edits:
        pair = pair.change(offset, layout, abs(value) if layout == "Q" else value)
    result = read(folder, pair)
    assert result is REJECTED or result == read(folder, good)


def test_huge_counts_allocate_no_memory(folder: Path, good: Pair) -> None:
    tracemalloc.start()
    try:
        for counts in ((1 << 40, 1 << 40), ((1 << 64) - 1, 1), (1 << 61, COUNT + 1)):
            assert read(folder, good.change(N_AT, "QQ", *counts)) is REJECTED
        assert read(folder, good.change(LENGTHS_AT, "i", (1 << 31) - 1)) is REJECTED
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "loop"])
def test_path_that_is_not_a_regular_file_is_rejected(
    tmp_path: Path, good: Pair, suffix: str, kind: str
) -> None:
    read(tmp_path, good)
    path = tmp_path / f"p{suffix}"
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening it would wait for a writer
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(UserError, match=f"p{suffix}"):
        IndexedDataset(tmp_path / "p")


def test_pairs_without_tokens_are_read(tmp_path: Path) -> None:
    for documents in ([], [[]], [[], []]):
        with IndexedWriter(tmp_path / "p", "int32") as writer:
            for document in documents:
                writer.add_document(document)
        data = IndexedDataset(tmp_path / "p")
        assert [data.get(number).tolist() for number in range(len(data))] == documents
        with pytest.raises(ValueError):
            build_indexes(data.lengths, np.arange(len(data)), 1, 3, 1)
