"""Damaged `.bin/.idx` pairs: refused with the file's name, or read as they were written."""

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

from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.indexed_dataset import IndexedDataset, IndexedWriter
from megatron_ds.data.sample_index import build_indexes
from tests.fuzz.fuzz_helpers import FUZZ, REFUSED, read_or_refuse

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
        """With other numbers from a byte of the index on."""
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
    """All that training takes from a pair."""
    (folder / "p.idx").write_bytes(pair.idx)
    (folder / "p.bin").write_bytes(pair.bin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = IndexedDataset(folder / "p")
    indexes = build_indexes(data.lengths, np.arange(len(data)), 5, 3, 1)
    dataset = GPTDataset(data, indexes, 3, VOCABULARY)
    return [dataset[number].tolist() for number in range(len(dataset))]


def read(folder: Path, pair: Pair) -> object:
    """The same; REFUSED if the pair is refused in words."""
    return read_or_refuse(lambda: samples(folder, pair), str(folder / "p"))


BY_HAND: dict[str, tuple[Callable[[Pair], Pair], str]] = {
    "empty index": (lambda p: p._replace(idx=b""), "p.idx is no Megatron index"),
    "only the magic": (lambda p: p._replace(idx=p.idx[:9]), "p.idx is no Megatron index"),
    "only the header": (lambda p: p._replace(idx=p.idx[:34]), "has 34 bytes, but its header"),
    "header cut": (lambda p: p._replace(idx=p.idx[:33]), "p.idx is no Megatron index"),
    "another magic": (lambda p: p._replace(idx=b"PK\3\4" + p.idx[4:]), "p.idx is no Megatron"),
    "text": (lambda p: p._replace(idx=b"once upon a time " * 9), "p.idx is no Megatron index"),
    "the lazy format": (lambda p: p._replace(idx=b"TNTIDX\0\0" + p.idx), "old `lazy`/`cached`"),
    "version 0": (lambda p: p.change(VERSION_AT, "Q", 0), "format version 0"),
    "version 2": (lambda p: p.change(VERSION_AT, "Q", 2), "format version 2"),
    "big-endian version": (lambda p: p.change(VERSION_AT, "Q", 1 << 56), "format version"),
    "dtype code 0": (lambda p: p.change(CODE_AT, "B", 0), "dtype code 0; valid"),
    "dtype code 6": (lambda p: p.change(CODE_AT, "B", 6), "dtype code 6: a floating-point"),
    "dtype code 7": (lambda p: p.change(CODE_AT, "B", 7), "dtype code 7: a floating-point"),
    "dtype code 9": (lambda p: p.change(CODE_AT, "B", 9), "dtype code 9; valid"),
    "dtype code 255": (lambda p: p.change(CODE_AT, "B", 255), "dtype code 255; valid"),
    "narrower dtype": (lambda p: p.change(CODE_AT, "B", 1), "p.idx is damaged: sequence"),
    "wider dtype": (lambda p: p.change(CODE_AT, "B", 4), "p.idx is damaged: sequence"),
    "signed dtype": (lambda p: p.change(CODE_AT, "B", 3), "p.bin: sample"),
    "no sequences": (lambda p: p.change(N_AT, "Q", 0), "but its header describes"),
    "one more sequence": (lambda p: p.change(N_AT, "Q", COUNT + 1), "but its header describes"),
    "2^31 sequences": (lambda p: p.change(N_AT, "Q", 1 << 31), "but its header describes"),
    "2^64 - 1 sequences": (lambda p: p.change(N_AT, "Q", (1 << 64) - 1), "but its header"),
    "sequences that overflow": (lambda p: p.change(N_AT, "Q", (1 << 62) + COUNT), "its header"),
    "no documents": (lambda p: p.change(D_AT, "Q", 0), "but its header describes"),
    "2^64 - 1 documents": (lambda p: p.change(D_AT, "Q", (1 << 64) - 1), "but its header"),
    "counts exchanged": (lambda p: p.change(N_AT, "QQ", COUNT + 1, COUNT), "its header describes"),
    "no counts at all": (
        lambda p: p._replace(idx=p.change(N_AT, "QQ", 0, 0).idx[:34]),
        "does not end at its 0 sequences",
    ),
    "a negative length": (lambda p: p.change(LENGTHS_AT, "i", -3), "sequence 0 has -3 tokens"),
    "a length too long": (lambda p: p.change(LENGTHS_AT, "i", 4), "sequence 1 begins at byte 6"),
    "a huge length": (lambda p: p.change(LENGTHS_AT, "i", (1 << 31) - 1), "sequence 1 begins"),
    "a length of 0": (lambda p: p.change(LENGTHS_AT, "i", 0), "sequence 1 begins at byte 6"),
    "the last length too long": (
        lambda p: p.change(POINTERS_AT - 4, "i", 3),
        "p.bin has 20 bytes, but .*p.idx describes 22",
    ),
    "the last length too short": (lambda p: p.change(POINTERS_AT - 4, "i", 1), "describes 18"),
    "the last length negative": (lambda p: p.change(POINTERS_AT - 4, "i", -1), "has -1 tokens"),
    "the last length huge": (lambda p: p.change(POINTERS_AT - 4, "i", 1 << 30), "p.bin has 20"),
    "lengths exchanged": (lambda p: p.change(LENGTHS_AT, "ii", 0, 3), "sequence 1 begins"),
    "first pointer not 0": (lambda p: p.change(POINTERS_AT, "q", 2), "sequence 0 begins at byte 2"),
    "a negative pointer": (lambda p: p.change(POINTERS_AT, "q", -2), "begins at byte -2"),
    "an odd pointer": (lambda p: p.change(POINTERS_AT + 8, "q", 5), "sequence 1 begins at byte 5"),
    "a pointer beyond the tokens": (
        lambda p: p.change(POINTERS_AT + 24, "q", 1 << 40),
        "begins at",
    ),
    "a pointer that overflows": (
        lambda p: p.change(POINTERS_AT + 32, "q", (1 << 63) - 1),
        "begins at byte 9223372036854775807",
    ),
    "pointers backwards": (lambda p: p.change(POINTERS_AT + 16, "qq", 8, 6), "sequence 2 begins"),
    "all pointers 0": (lambda p: p.change(POINTERS_AT, f"{COUNT}q", *[0] * COUNT), "sequence 1"),
    "pointers in tokens": (
        lambda p: p.change(POINTERS_AT, f"{COUNT}q", 0, 3, 3, 4, 8),
        "sequence 1 begins at byte 3, but those before it end at 6",
    ),
    "documents begin at 1": (lambda p: p.change(DOCUMENTS_AT, "q", 1), "document index does not"),
    "documents end early": (
        lambda p: p.change(DOCUMENTS_AT + 8 * COUNT, "q", COUNT - 1),
        "document index does not end at its 5 sequences",
    ),
    "documents end late": (lambda p: p.change(DOCUMENTS_AT + 8 * COUNT, "q", 99), "does not end"),
    "documents backwards": (
        lambda p: p.change(DOCUMENTS_AT + 8, "qq", 3, 1),
        "document 1 begins at sequence 3 and ends at 1",
    ),
    "a negative document": (lambda p: p.change(DOCUMENTS_AT + 8, "q", -1), "begins at sequence 0"),
    "a document beyond the end": (lambda p: p.change(DOCUMENTS_AT + 8, "q", 1 << 50), "document 1"),
    "one byte more in the index": (lambda p: p._replace(idx=p.idx + b"\0"), "its header describes"),
    "no tokens": (lambda p: p._replace(bin=b""), "p.bin has 0 bytes"),
    "one byte of tokens less": (lambda p: p._replace(bin=p.bin[:-1]), "p.bin has 19 bytes"),
    "one byte of tokens more": (lambda p: p._replace(bin=p.bin + b"\0"), "p.bin has 21 bytes"),
    "one token more": (lambda p: p._replace(bin=p.bin + b"\0\0"), "p.bin has 22 bytes"),
    "another's tokens": (lambda p: p._replace(bin=p.bin * 2), "p.bin has 40 bytes"),
    "one EOD per document, not the same": (
        lambda p: p._replace(bin=p.bin + bytes(range(2 * COUNT))),
        "p.bin has 30 bytes",
    ),
    "tokens beyond the vocabulary": (
        lambda p: p._replace(bin=b"\xff\xff" + p.bin[2:]),
        "p.bin: sample . has the token 65535, which a vocabulary of 65400 has not",
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(tmp_path: Path, good: Pair, name: str) -> None:
    damage, message = BY_HAND[name]
    with pytest.raises(ValueError, match=message) as raised:
        samples(tmp_path, damage(good))
    assert str(tmp_path / "p") in str(raised.value)


def test_the_undamaged_pair_is_read(folder: Path, good: Pair) -> None:
    samples = read(folder, good)
    assert isinstance(samples, list)
    assert {token for sample in samples for token in sample} <= {1, 2, 3, 4, 5, 6, 7, 9, 65000}


def test_cut_at_every_byte(folder: Path, good: Pair) -> None:
    for size in range(len(good.idx)):
        assert read(folder, good._replace(idx=good.idx[:size])) is REFUSED, size
    for size in range(len(good.bin)):
        assert read(folder, good._replace(bin=good.bin[:size])) is REFUSED, size


def test_every_bit_of_the_index_flipped(folder: Path, good: Pair) -> None:
    whole = read(folder, good)
    read_all_the_same = []
    for bit in range(8 * len(good.idx)):
        damaged = bytearray(good.idx)
        damaged[bit // 8] ^= 1 << bit % 8
        result = read(folder, good._replace(idx=bytes(damaged)))
        if result is not REFUSED:
            assert result == whole, bit
            read_all_the_same.append(bit // 8)
    # Where documents begin decides nothing of the samples; all else is found.
    assert all(at >= DOCUMENTS_AT for at in read_all_the_same)


@given(
    code=st.integers(0, 255),
    version=st.integers(0, 2),
    counts=st.tuples(*[st.integers(0, 12) | st.integers(0, (1 << 64) - 1)] * 2),
    rest=st.binary(max_size=120),
)
@FUZZ
def test_any_header(
    folder: Path, code: int, version: int, counts: tuple[int, int], rest: bytes
) -> None:
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, *counts)
    assert read(folder, Pair(header + rest, b"\1\0" * 10)) is REFUSED


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
@FUZZ
def test_several_numbers_changed(
    folder: Path, good: Pair, edits: list[tuple[str, int, int]]
) -> None:
    pair = good
    for layout, offset, value in edits:
        pair = pair.change(offset, layout, abs(value) if layout == "Q" else value)
    result = read(folder, pair)
    assert result is REFUSED or result == read(folder, good)


def test_huge_counts_take_no_memory(folder: Path, good: Pair) -> None:
    tracemalloc.start()
    try:
        for counts in ((1 << 40, 1 << 40), ((1 << 64) - 1, 1), (1 << 61, COUNT + 1)):
            assert read(folder, good.change(N_AT, "QQ", *counts)) is REFUSED
        assert read(folder, good.change(LENGTHS_AT, "i", (1 << 31) - 1)) is REFUSED
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "loop"])
def test_what_is_no_file(tmp_path: Path, good: Pair, suffix: str, kind: str) -> None:
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
    with pytest.raises(ValueError, match=f"p{suffix}"):
        IndexedDataset(tmp_path / "p")


def test_the_pairs_with_no_sequence_and_with_empty_ones(tmp_path: Path) -> None:
    for documents in ([], [[]], [[], []]):
        with IndexedWriter(tmp_path / "p", "int32") as writer:
            for document in documents:
                writer.add_document(document)
        data = IndexedDataset(tmp_path / "p")
        assert [data.get(number).tolist() for number in range(len(data))] == documents
        with pytest.raises(ValueError, match="hold no tokens"):
            build_indexes(data.lengths, np.arange(len(data)), 1, 3, 1)
