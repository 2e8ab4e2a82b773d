"""Merged pairs: the bytes of one preprocessing, all that a pair holds, and what is refused."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data import indexed_dataset
from megatron_ds.data.indexed_dataset import IndexedDataset, IndexedWriter
from megatron_ds.data.merge import Merged, merge, prefixes_in


def pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> str:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


def content(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
def test_merged_bytes_are_those_of_one_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """In the order given, an input twice, whatever the size of the blocks that are copied."""
    a, b, c = [[1, 2, 3], [4]], [[5] * 10], [[6, 7], [8], [9]]
    prefixes = [pair(tmp_path / name, texts) for name, texts in zip("cab", (c, a, b), strict=True)]
    whole = pair(tmp_path / "whole", [*c, *a, *b, *c])
    monkeypatch.setattr(indexed_dataset, "CHUNK", block)
    seen: list[Merged] = []
    done = merge([*prefixes, prefixes[0]], str(tmp_path / "out"), seen.append)
    assert content(tmp_path / "out") == content(whole)
    assert done == Merged(4, 9, 9, 22, 44, 44)
    assert [merged.documents for merged in seen] == [3, 5, 6, 9]


def test_documents_of_many_sequences_and_of_none_are_kept(tmp_path: Path) -> None:
    """Pairs of other writers: sentences of a document, and documents without a sequence."""
    lengths, starts = [2, 1, 3], [0, 2, 2, 3]
    tokens = np.arange(6, dtype="<u2")
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    index += struct.pack("<3i", *lengths) + struct.pack("<3q", 0, 4, 6)
    (tmp_path / "p.idx").write_bytes(index + struct.pack("<4q", *starts))
    (tmp_path / "p.bin").write_bytes(tokens.tobytes())
    merge([str(tmp_path / "p")] * 2, str(tmp_path / "out"))
    data = IndexedDataset(tmp_path / "out")
    assert data.lengths.tolist() == lengths * 2
    assert data.document_index.tolist() == [0, 2, 2, 3, 5, 5, 6]
    assert data.tokens.tolist() == [*range(6)] * 2
    merge([str(tmp_path / "p")], str(tmp_path / "same"))
    assert content(tmp_path / "same") == content(tmp_path / "p")


def test_an_empty_pair_adds_nothing(tmp_path: Path) -> None:
    full, empty = pair(tmp_path / "full", [[1]]), pair(tmp_path / "empty", [])
    merge([empty, full, empty], str(tmp_path / "out"))
    assert content(tmp_path / "out") == content(full)


def test_the_pairs_of_a_folder_are_taken_by_name(tmp_path: Path) -> None:
    for name in ("b", "a.x", "c"):
        pair(tmp_path / name, [[1]])
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "sub").mkdir()
    assert prefixes_in(str(tmp_path)) == [str(tmp_path / name) for name in ("a.x", "b", "c")]
    (tmp_path / "a.x.bin").unlink()
    (tmp_path / "c.idx").unlink()
    with pytest.raises(ValueError, match=r"(?s)a\.x\.idx is there without its \.bin.*c\.bin is"):
        prefixes_in(str(tmp_path))
    with pytest.raises(ValueError, match="holds no pair"):
        prefixes_in(str(tmp_path / "sub"))
    with pytest.raises(ValueError, match="no such folder"):
        prefixes_in(str(tmp_path / "none"))


def test_all_problems_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    small, wide = pair(tmp_path / "small", [[1]]), pair(tmp_path / "wide", [[1]], "int32")
    cut = pair(tmp_path / "cut", [[1, 2]])
    Path(cut + ".bin").write_bytes(b"\x01\x00")
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError) as raised:
        merge([small, wide, cut, str(tmp_path / "none")], str(tmp_path / "no" / "out"))
    found = str(raised.value)
    assert "there is no folder" in found
    assert f"{wide} holds int32 and {small} uint16" in found
    assert f"{cut}.bin has 2 bytes, but {cut}.idx describes 4" in found
    assert f"there is no file {tmp_path / 'none'}.idx" in found
    assert sorted(os.listdir(tmp_path)) == before


def test_the_output_may_not_be_an_input(tmp_path: Path) -> None:
    small = pair(tmp_path / "small", [[1]])
    before = content(small)
    with pytest.raises(ValueError, match="is one of the inputs"):
        merge([small], f"{tmp_path}/../{tmp_path.name}/small")
    assert content(small) == before


def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    small = pair(tmp_path / "small", [[1]])

    def fail(merged: Merged) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        merge([small], str(tmp_path / "out"), fail)
    assert sorted(os.listdir(tmp_path)) == ["small.bin", "small.idx"]


def test_more_pairs_than_files_that_can_be_open(tmp_path: Path) -> None:
    prefixes = [pair(tmp_path / str(number), [[number]]) for number in range(40)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/dev/fd"))) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        assert merge(prefixes, str(tmp_path / "all")).tokens == 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
