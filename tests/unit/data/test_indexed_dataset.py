"""Pairs of token files, compared byte by byte with an independent writer of the format."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.token_files import indexed_writer
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset, token_dtype
from megatron_ds.data.token_files.indexed_writer import pair_writer
from tests.foreign_files import LLM_C, fairseq_index
from tests.problems import raises_problem
from tests.token_files import write_pair, write_reference

DOCUMENTS = [[5, 6, 7], [1], [65000, 2, 3, 4]]
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("dtype", "code", "letter"), [("uint16", 8, "H"), ("int32", 4, "i"), ("int64", 5, "q")]
)
def test_written_bytes_equal_the_reference(
    tmp_path: Path, dtype: str, code: int, letter: str
) -> None:
    """Claim (data): `.bin` and `.idx` token files equal Megatron's byte for byte"""
    write_reference(tmp_path / "reference", [[d] for d in DOCUMENTS], code, letter)
    with pair_writer(tmp_path / "ours", dtype) as writer:
        writer.add_documents(DOCUMENTS[0], [len(DOCUMENTS[0])])
        writer.add_documents([*DOCUMENTS[1], *DOCUMENTS[2]], [1, 4])
    for suffix in (".bin", ".idx"):
        ours, reference = (tmp_path / f"{name}{suffix}" for name in ("ours", "reference"))
        assert ours.read_bytes() == reference.read_bytes()
    names = [path.name for path in sorted(tmp_path.iterdir())]
    assert names == ["ours.bin", "ours.idx", "reference.bin", "reference.idx"]


@pytest.mark.parametrize(("code", "letter"), [(8, "H"), (4, "i")])
def test_documents_with_several_and_without_sequences_are_read(
    tmp_path: Path, code: int, letter: str
) -> None:
    documents = [[[1, 2], [3]], [], [[4, 5, 6]]]
    write_reference(tmp_path / "p", documents, code, letter)
    data = IndexedDataset(tmp_path / "p")
    assert (data.dtype, len(data), data.lengths.tolist()) == (np.dtype(letter), 3, [2, 1, 3])
    assert data.document_index.tolist() == [0, 2, 2, 3]
    assert [data.get(i).tolist() for i in range(3)] == [[1, 2], [3], [4, 5, 6]]


def test_uncounted_eod_is_corrected_with_a_warning(tmp_path: Path) -> None:
    documents = [[[1, 2, 9]], [], [[3], [4, 9]], [[9]]]
    write_reference(tmp_path / "p", documents, uncounted=1)
    with pytest.warns(UserWarning, match="token 9 of its 3 documents"):
        data = IndexedDataset(tmp_path / "p")
    assert [data.get(i).tolist() for i in range(4)] == [[1, 2, 9], [3], [4, 9], [9]]
    write_reference(tmp_path / "good", documents)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = IndexedDataset(tmp_path / "good")
    assert data.pointers.tolist() == good.pointers.tolist()


def test_failed_writer_keeps_the_older_pair(tmp_path: Path) -> None:
    write_pair(tmp_path / "p", [[1]])
    with raises_problem("token-exceeds-dtype"):
        write_pair(tmp_path / "p", [[2], [-1]])
    assert IndexedDataset(tmp_path / "p").get(0).tolist() == [1]
    assert sorted(os.listdir(tmp_path)) == ["p.bin", "p.idx"]


def test_killed_writer_leaves_no_pair(tmp_path: Path) -> None:
    code = (
        "import os, signal\n"
        "from megatron_ds.data.token_files.indexed_writer import pair_writer\n"
        f"with pair_writer({str(tmp_path / 'p')!r}, 'uint16') as writer:\n"
        "    writer.add_documents([7] * 100000, [100000])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["p.pair.work"]
    assert IndexedDataset(write_pair(tmp_path / "p", [[8]])).get(0).tolist() == [8]
    assert sorted(os.listdir(tmp_path)) == ["p.bin", "p.idx"]


def test_second_writer_of_a_prefix_is_rejected(tmp_path: Path) -> None:
    with pair_writer(tmp_path / "p", "uint16") as writer:
        writer.add_documents([1], [1])
        with raises_problem("output-in-use"):
            write_pair(tmp_path / "p", [])
    assert IndexedDataset(tmp_path / "p").get(0).tolist() == [1]


def test_documents_are_appended_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_writer, "BLOCK_ITEMS", 2)
    with pair_writer(tmp_path / "p", "int32") as writer:
        writer.add_documents([1, 2, 3, 4], [1, 3], [2])
        writer.add_documents([], [], [])
        writer.add_documents([5, 6, 7], [1, 1, 1], [0, 1, 2])
        writer.add_documents([8, 9], [2])
        with pytest.raises(ValueError):
            writer.add_documents([1, 1], [1, 1], [3])
    data = IndexedDataset(tmp_path / "p")
    assert data.lengths.tolist() == [1, 3, 1, 1, 1, 2]
    assert data.document_index.tolist() == [0, 2, 2, 3, 5, 6]
    with pair_writer(tmp_path / "q", "int32") as writer:
        writer.add_dataset(data)
        writer.add_dataset(data)
    twice = IndexedDataset(tmp_path / "q")
    assert twice.document_index.tolist() == [0, 2, 2, 3, 5, 6, 8, 8, 9, 11, 12]
    assert twice.tokens.tolist() == data.tokens.tolist() * 2


def test_memory_does_not_grow_with_the_number_of_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexed_writer, "BLOCK_ITEMS", 1000)
    ones = np.ones(1000, np.uint16)
    peaks = []
    for thousands in (20, 200):
        tracemalloc.start()
        with pair_writer(tmp_path / str(thousands), "uint16") as writer:
            for _ in range(thousands):
                writer.add_documents(ones, ones)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    lengths = 180_000 * 4  # bytes of the additional lengths
    assert peaks[1] < peaks[0] + lengths // 3
    assert len(IndexedDataset(tmp_path / "200")) == 200_000


def test_tokens_and_dtypes_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    with pair_writer(tmp_path / "p", "uint16") as writer:
        for tokens in ([65536], [-1]):
            with raises_problem("token-exceeds-dtype"):
                writer.add_documents(tokens, [1])
        with pytest.raises(ValueError):
            writer.add_documents([1, 2, 3], [2])
    with pytest.raises(ValueError, match="float32"):
        write_pair(tmp_path / "q", [], "float32")


def test_token_dtype_depends_on_the_vocabulary_size() -> None:
    assert (token_dtype(65499), token_dtype(65500)) == (np.uint16, np.int32)


def test_a_wrong_index_is_named(tmp_path: Path) -> None:
    """Claim (data): indexes of fairseq, of unknown versions and types of tokens, and indexes of
    another file are errors that name them"""
    prefix, other = (write_pair(tmp_path / name, [range(n)]) for name, n in (("p", 4), ("q", 7)))
    good = Path(f"{prefix}.idx").read_bytes()

    def check(index: bytes, code: str, contains: str) -> None:
        Path(f"{prefix}.idx").write_bytes(index)
        with raises_problem(code, contains=contains):
            IndexedDataset(prefix)

    check(fairseq_index([4]), "token-index-without-documents", "fairseq")
    check(b"TNTIDX\0\0" + good, "legacy-token-file", "TNTIDX")
    check(good[:9] + b"\2" + good[10:], "unknown-token-index-version", "version 2")
    check(good[:17] + b"\x09" + good[18:], "unknown-token-dtype", "uint32")
    check(b"\x93NUMPY\x01\0" + bytes(120), "not-a-token-index", "NumPy")
    check(Path(f"{other}.idx").read_bytes(), "token-file-size-mismatch", f"{prefix}.idx")
    Path(f"{prefix}.idx").write_bytes(good)
    for content, contains in (
        (Path(f"{other}.bin").read_bytes(), f"{other}.idx describes"),
        (LLM_C, "llm.c"),
        (b"\1\0", "incomplete"),
    ):
        Path(f"{prefix}.bin").write_bytes(content)
        with raises_problem("token-file-size-mismatch", contains=contains):
            IndexedDataset(prefix)
