"""Damaged pairs of token files are rejected, or read as they were written."""

from __future__ import annotations

import os
import struct
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.config.problems import UserError
from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.sample_index import build_indexes
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, REJECTED, read_or_error
from tests.problems import raises_problem
from tests.token_files import write_pair

DOCUMENTS = [[5, 6, 7], [], [1], [65000, 2, 3, 4], [9, 9]]
COUNT = len(DOCUMENTS)
VERSION_AT = 9
CODE_AT = 17
N_AT = 18
D_AT = 26
LENGTHS_AT = 34
POINTERS_AT = LENGTHS_AT + 4 * COUNT
DOCUMENTS_AT = LENGTHS_AT + 12 * COUNT
END_AT = DOCUMENTS_AT + 8 * COUNT
UINT64 = (1 << 64) - 1
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
    write_pair(folder / "good", DOCUMENTS)
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


# What the index contains instead, by the code of the problem: offset, layout, numbers.
CHANGES: dict[str, list[tuple[Any, ...]]] = {
    "unknown-token-index-version": [(VERSION_AT, "Q", version) for version in (0, 2, 1 << 56)],
    "unknown-token-dtype": [(CODE_AT, "B", dtype) for dtype in (0, 9, 255)],
    "floating-point-tokens": [(CODE_AT, "B", dtype) for dtype in (6, 7)],
    "sample-token-outside-vocabulary": [(CODE_AT, "B", 3)],  # signed
    "token-index-size-mismatch": [
        *((N_AT, "Q", count) for count in (0, COUNT + 1, 1 << 31, UINT64, (1 << 62) + COUNT)),
        *((D_AT, "Q", count) for count in (0, UINT64)),
        (N_AT, "QQ", COUNT + 1, COUNT),
    ],
    "negative-sequence-length": [(LENGTHS_AT, "i", -3), (POINTERS_AT - 4, "i", -1)],
    "token-file-size-mismatch": [(POINTERS_AT - 4, "i", length) for length in (1, 3, 1 << 30)],
    "sequences-not-contiguous": [
        *((CODE_AT, "B", dtype) for dtype in (1, 4)),  # narrower and wider
        *((LENGTHS_AT, "i", length) for length in (0, 4, (1 << 31) - 1)),
        (LENGTHS_AT, "ii", 0, 3),
        *((POINTERS_AT, "q", pointer) for pointer in (2, -2)),
        (POINTERS_AT + 8, "q", 5),
        (POINTERS_AT + 16, "qq", 8, 6),
        (POINTERS_AT + 24, "q", 1 << 40),
        (POINTERS_AT + 32, "q", (1 << 63) - 1),
        (POINTERS_AT, f"{COUNT}q", *[0] * COUNT),
        (POINTERS_AT, f"{COUNT}q", 0, 3, 3, 4, 8),  # counted in tokens
    ],
    "damaged-document-index": [(DOCUMENTS_AT, "q", 1), (END_AT, "q", COUNT - 1), (END_AT, "q", 99)],
    "documents-not-in-order": [
        (DOCUMENTS_AT + 8, "qq", 3, 1),
        (DOCUMENTS_AT + 8, "q", -1),
        (DOCUMENTS_AT + 8, "q", 1 << 50),
    ],
}
# Contents of the index and of the tokens, from those of the good pair.
CONTENTS: dict[str, Callable[[bytes, bytes], list[tuple[bytes, bytes]]]] = {
    "not-a-token-index": lambda idx, bin: [
        *((idx[:size], bin) for size in (0, 9, 33)),
        *((other, bin) for other in (b"PK\3\4" + idx[4:], b"once upon a time " * 9)),
    ],
    "legacy-token-file": lambda idx, bin: [(b"TNTIDX\0\0" + idx, bin)],
    "damaged-document-index": lambda idx, bin: [(idx[:N_AT] + bytes(16), bin)],
    "token-index-size-mismatch": lambda idx, bin: [(idx[:34], bin), (idx + b"\0", bin)],
    "token-file-size-mismatch": lambda idx, bin: [
        *((idx, other) for other in (b"", bin[:-1], bin * 2, bin + b"\0", bin + b"\0\0")),
        (idx, bin + bytes(range(2 * COUNT))),  # different tokens, not one EOD
    ],
    "sample-token-outside-vocabulary": lambda idx, bin: [(idx, b"\xff\xff" + bin[2:])],
}


@pytest.mark.parametrize(
    ("code", "change"), [(code, change) for code in CHANGES for change in CHANGES[code]]
)
def test_changed_index_is_rejected(
    tmp_path: Path, good: Pair, code: str, change: tuple[Any, ...]
) -> None:
    with raises_problem(code, contains=str(tmp_path / "p")):
        samples(tmp_path, good.change(*change))


@pytest.mark.parametrize("code", CONTENTS)
def test_damaged_file_is_rejected(tmp_path: Path, good: Pair, code: str) -> None:
    for damaged in CONTENTS[code](*good):
        with raises_problem(code, contains=str(tmp_path / "p")):
            samples(tmp_path, Pair(*damaged))


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
        data = IndexedDataset(write_pair(tmp_path / "p", documents, "int32"))
        assert [data.get(number).tolist() for number in range(len(data))] == documents
        with pytest.raises(ValueError):
            build_indexes(data.lengths, np.arange(len(data)), 1, 3, 1)
