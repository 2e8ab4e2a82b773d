"""Summary, integrity check and comparison of pairs of token files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.data.token_files import token_file_stats as module
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
from megatron_ds.data.token_files.token_file_stats import (
    FirstDifference,
    LengthBin,
    check,
    compare,
    document,
    summarize,
    summary_lines,
)
from tests.problems import codes, raises_problem
from tests.token_files import write_pair


def pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> IndexedDataset:
    return IndexedDataset(write_pair(prefix, documents, dtype))


def regroup(data: IndexedDataset, starts: list[int]) -> IndexedDataset:
    """Assigns the sequences to other documents."""
    path = Path(data.prefix + ".idx")
    head = bytearray(path.read_bytes()[: 34 + 12 * len(data)])
    head[26:34] = len(starts).to_bytes(8, "little")
    path.write_bytes(bytes(head) + np.array(starts, "<i8").tobytes())
    return IndexedDataset(data.prefix)


def test_summary_and_histogram(tmp_path: Path) -> None:
    sizes = [1, 2, 3, 3, 4, 7, 8, 40]
    data = pair(tmp_path / "p", [[5] * size for size in sizes])
    data = regroup(data, [0, 1, 2, 2, *range(3, 9)])  # the third document has no sequence
    found = summarize(data)
    assert (found.documents, found.empty_documents, found.sequences, found.tokens) == (9, 1, 8, 68)
    assert (found.shortest, found.longest, found.mean) == (0, 40, 68 / 9)
    assert found.quantiles[0.5] == 3
    assert (found.token_bytes, found.index_bytes) == (136, 34 + 8 * 12 + 10 * 8)
    assert found.histogram == [
        LengthBin(0, 0, 1, 0),
        LengthBin(1, 1, 1, 1),
        LengthBin(2, 3, 3, 8),
        LengthBin(4, 7, 2, 11),
        LengthBin(8, 15, 1, 8),
        LengthBin(16, 31, 0, 0),
        LengthBin(32, 63, 1, 40),
    ]
    lines = list(summary_lines(found))
    assert "9 documents (1 empty), 8 sequences, 68 tokens" in lines[3]
    assert lines[7].split() == ["2-3", "3", "documents", "8", "tokens", "#" * 40]
    assert (document(data, 2).tolist(), document(data, 8).tolist()) == ([], [5] * 40)
    for number in (-1, 9):
        with raises_problem("no-such-document", contains=str(number)):
            document(data, number)


def test_document_consists_of_its_sequences(tmp_path: Path) -> None:
    data = regroup(pair(tmp_path / "p", [[1, 2], [3], [4, 5]]), [0, 2, 3])
    assert [document(data, number).tolist() for number in (0, 1)] == [[1, 2, 3], [4, 5]]
    assert summarize(data).longest == 3


def test_pair_without_documents(tmp_path: Path) -> None:
    data = pair(tmp_path / "p", [])
    assert summarize(data).histogram == []
    assert check(data, 10, 9).highest is None
    assert compare(data, data) == FirstDifference("")


@pytest.mark.parametrize("block", [2, 1 << 20])
def test_tokens_outside_the_vocabulary_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(module, "BLOCK_TOKENS", block)
    data = pair(tmp_path / "p", [[1, 2, 9], [3], [10, 4, 9], [11]], "int32")
    found = check(data, 10, 9)
    assert (found.lowest, found.highest, found.documents_ending_with_eod) == (1, 11, 2)
    assert codes(found.problems) == ["tokens-outside-vocabulary"]
    assert "first is 10 in document 2" in str(found.problems[0])
    assert found.sha256_bin == hashlib.sha256((tmp_path / "p.bin").read_bytes()).hexdigest()
    assert check(data, 12).problems == []
    negative = check(pair(tmp_path / "n", [[1], [-1]], "int32"))
    assert "first is -1 in document 1" in str(negative.problems[0])


DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=5)


@given(DOCUMENTS, DOCUMENTS)
@settings(derandomize=True, deadline=None, database=None, max_examples=60)
def test_first_difference(
    tmp_path_factory: pytest.TempPathFactory, left: list[list[int]], right: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    a = pair(folder / "a", left)
    b = pair(folder / "b", right, "int32")
    found = compare(a, b)
    if left == right:
        assert found == FirstDifference("")
        return
    expected = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), None)
    if expected is None:
        expected = min(len(left), len(right))
        token = 0
    else:
        x = left[expected]
        y = right[expected]
        size = min(len(x), len(y))
        token = next((i for i in range(size) if x[i] != y[i]), size)
    assert found.description
    assert (found.document, found.token) == (expected, token)


def test_equal_tokens_with_other_boundaries(tmp_path: Path) -> None:
    joined = pair(tmp_path / "joined", [[1], [2, 3]])
    split = regroup(pair(tmp_path / "split", [[1], [2], [3]]), [0, 1, 3])
    found = compare(joined, split)
    assert found.description
    assert (found.document, found.token) == (1, None)
    empty = [
        regroup(pair(tmp_path / name, [[1], [2]]), starts)
        for name, starts in (("e", [0, 0, 1, 2]), ("f", [0, 1, 1, 2]))
    ]
    assert compare(*empty).document == 0
