"""The indexes, compared with a naive implementation of Megatron's definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from megatron_ds.data import sample_index
from megatron_ds.data.sample_index import (
    build_indexes,
    build_sample_index,
    index_dtype,
    parse_split,
    shuffle_dtype,
    split_bounds,
)
from tests.problems import raises_problem


def naive_indexes(
    lengths: list[int], documents: list[int], wanted: int, seq_length: int, seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int], bool]:
    """Megatron's three indexes in plain Python, and whether the last epoch is separate."""
    per_epoch = sum(lengths[d] for d in documents)
    epochs = 1
    while (epochs * per_epoch - 1) // seq_length < wanted:
        epochs += 1
    separate = False
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    if epochs > 1:
        samples_per_epoch = (per_epoch - 1) // seq_length
        separate = wanted - before_last < int(0.80 * samples_per_epoch)
    rng = np.random.RandomState(seed)
    if separate:
        first = np.array(documents * (epochs - 1), dtype=np.int32)
        rng.shuffle(first)
        last = np.array(documents, dtype=np.int32)
        rng.shuffle(last)
        order = [*first.tolist(), *last.tolist()]
    else:
        both = np.array(documents * epochs, dtype=np.int32)
        rng.shuffle(both)
        order = both.tolist()
    total = (epochs * per_epoch - 1) // seq_length
    starts = [(0, 0)]
    at, offset = 0, 0
    for _ in range(total):
        remaining = seq_length + 1
        while remaining:
            rest = lengths[order[at]] - offset
            remaining -= rest
            if remaining <= 0:
                offset += remaining + rest - 1
                remaining = 0
            else:
                at, offset = at + 1, 0
        starts.append((at, offset))
    middle = before_last if separate else total
    head = np.arange(middle, dtype=np.uint32)
    rng.shuffle(head)
    tail = np.arange(middle, total, dtype=np.uint32)
    rng.shuffle(tail)
    return order, starts, [*head.tolist(), *tail.tolist()], separate


@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
def test_indexes_equal_the_reference(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(sample_index, "CHUNK_DOCUMENTS", chunk)
    rng = random.Random(chunk)
    separated = 0
    for seed in range(60):
        lengths = [rng.choice([0, 1, 2, 5, 17, 40]) for _ in range(rng.randint(2, 30))] + [3]
        first = rng.randint(0, len(lengths) - 1)
        documents = list(range(first, len(lengths)))
        seq_length = rng.choice([1, 3, 8, 50])
        wanted = rng.randint(1, 60)
        request = (wanted, seq_length, seed)
        built = build_indexes(np.array(lengths, dtype=np.int32), np.array(documents), *request)
        order, starts, shuffle, separate = naive_indexes(lengths, documents, *request)
        assert built.documents.tolist() == order
        assert [tuple(row) for row in built.samples.tolist()] == starts
        assert built.shuffle.tolist() == shuffle
        separated += separate
    assert 0 < separated < 60


def test_barely_used_last_epoch_is_shuffled_separately() -> None:
    # An epoch of 100 tokens has 9 samples of 10; 80 % of that, rounded down, is 7. The second epoch
    # contributes 2 and 9 samples.
    lengths = np.full(10, 10, dtype=np.int32)
    few = build_indexes(lengths, np.arange(10), 11, 10, seed=3)
    assert sorted(few.documents[:10].tolist()) == list(range(10))
    assert sorted(few.shuffle[:9].tolist()) == list(range(9))
    many = build_indexes(lengths, np.arange(10), 18, 10, seed=3)
    assert sorted(many.documents[:10].tolist()) != list(range(10))
    assert sorted(many.shuffle[:9].tolist()) != list(range(9))


def test_index_dtypes_are_megatrons() -> None:
    built = build_indexes(np.array([5, 5], dtype=np.int32), np.arange(2), 2, 4, seed=0)
    found = [array.dtype for array in (built.documents, built.samples, built.shuffle)]
    assert found == [np.int32, np.int32, np.uint32]


def test_index_dtypes_at_their_limits() -> None:
    assert [index_dtype(2**31 + n) for n in (-2, -1, 0)] == [np.int32, np.int64, np.int64]
    assert [shuffle_dtype(2**32 + n) for n in (-3, -2)] == [np.uint32, np.int64]


def test_document_numbers_beyond_31_bits() -> None:
    lengths = np.broadcast_to(np.int32(7), 2**31 + 10)  # four bytes
    documents = np.arange(2**31 - 5, 2**31 + 5)
    built = build_indexes(lengths, documents, 10, 5, seed=1)
    assert built.documents.dtype == np.int64
    assert sorted(built.documents.tolist()) == documents.tolist()
    small = build_indexes(np.full(10, 7, dtype=np.int32), np.arange(10), 10, 5, seed=1)
    assert small.documents.dtype == np.int32
    assert (built.documents - documents[0] == small.documents).all()


@pytest.mark.parametrize("chunk", [1, 1 << 18])
def test_token_counts_beyond_32_bits(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(sample_index, "CHUNK_DOCUMENTS", chunk)
    most = 2**31 - 1
    lengths = np.array([most, 0, most, 3, most - 1, most], dtype=np.int32)
    seq_length = 2**29 + 1
    built = build_indexes(lengths, np.arange(6), 30, seq_length, seed=2)
    ends = np.cumsum(lengths[built.documents], dtype=np.int64)
    assert ends[-1] > 2**33
    for number, (at, offset) in enumerate(built.samples.tolist()):
        begin = int(ends[at]) - int(lengths[built.documents[at]])
        assert begin + offset == number * seq_length
        assert 0 <= offset < lengths[built.documents[at]]


def test_sample_index_with_wide_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.arange(4)
    narrow = build_sample_index(np.full(4, 9, dtype=np.int32), order, 5, 7)
    monkeypatch.setattr(sample_index, "index_dtype", lambda count: np.int64)
    wide = build_sample_index(np.full(4, 9, dtype=np.int32), order, 5, 7)
    assert (narrow.dtype, wide.dtype) == (np.int32, np.int64)
    assert narrow.tolist() == wide.tolist()


def test_documents_without_tokens_are_rejected() -> None:
    with pytest.raises(ValueError):
        build_indexes(np.zeros(3, dtype=np.int32), np.arange(3), 1, 4, seed=0)


@pytest.mark.parametrize(
    ("text", "fractions"),
    [
        *(("969,30,1", (0.969, 0.03, 0.001)), ("8/1/1", (0.8, 0.1, 0.1))),
        *(("100", (1, 0, 0)), ("90,10", (0.9, 0.1, 0))),
    ],
)
def test_split_is_normalized(text: str, fractions: tuple[float, float, float]) -> None:
    assert parse_split(text) == pytest.approx(fractions)


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "inf"])
def test_invalid_split_is_rejected(text: str) -> None:
    with raises_problem("invalid-split", "split"):
        parse_split(text)


@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        (1000, [(0, 969), (969, 999), (999, 1000)]),
        (10, [(0, 10), (10, 10), (10, 10)]),
        (25, [(0, 24), (24, 25), (25, 25)]),
    ],
)
def test_split_bounds_are_rounded_as_in_megatron(size: int, bounds: list[tuple[int, int]]) -> None:
    assert split_bounds(parse_split("969,30,1"), size) == bounds


def test_split_bounds_always_end_at_the_size() -> None:
    for size in range(1, 200):
        assert split_bounds(parse_split("1,1,1"), size)[-1][1] == size
