"""The indexes, compared with a naive implementation of Megatron's definition."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import numpy as np
import pytest

from megatron_ds.data import sample_index
from megatron_ds.data.sample_index import (
    build_indexes,
    index_dtype,
    parse_split,
    samples_per_source,
    shuffle_dtype,
    split_bounds,
)


def naive_indexes(
    lengths: list[int], documents: list[int], wanted: int, seq_length: int, seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int], bool]:
    """Megatron's three indexes in plain Python, and whether the last epoch is separate.

    Neighbours share a token, so T tokens give (T - 1) // S samples. A last epoch of which less than
    80 % of the samples are requested is not mixed with the others.
    """
    epoch = sum(lengths[d] for d in documents)
    epochs = next(n for n in itertools.count(1) if (n * epoch - 1) // seq_length >= wanted)
    total, before_last = ((n * epoch - 1) // seq_length for n in (epochs, epochs - 1))
    enough = int(0.80 * ((epoch - 1) // seq_length))
    separate = epochs > 1 and wanted - before_last < enough
    rng = np.random.RandomState(seed)

    def shuffled(numbers: Iterable[int]) -> list[int]:
        array = np.array(list(numbers), dtype=np.int64)
        rng.shuffle(array)
        return [int(number) for number in array]

    order = shuffled(documents * (epochs - separate)) + shuffled(documents * separate)
    stream = [(at, offset) for at, d in enumerate(order) for offset in range(lengths[d])]
    starts = [(0, 0), *(stream[sample * seq_length] for sample in range(1, total + 1))]
    middle = before_last if separate else total
    return order, starts, shuffled(range(middle)) + shuffled(range(middle, total)), separate


@pytest.mark.parametrize("chunk", [1, 3, 1 << 18])
def test_indexes_equal_the_reference(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Claim (samples): document, sample and shuffle indexes are those that Megatron defines"""
    monkeypatch.setattr(sample_index, "CHUNK_DOCUMENTS", chunk)
    rng = random.Random(chunk)
    seen = set()
    for seed in range(60):
        lengths = [rng.choice([0, 1, 2, 5, 17, 40]) for _ in range(rng.randint(2, 30))] + [3]
        first = rng.randint(0, len(lengths) - 1)
        documents = list(range(first, len(lengths)))
        if sum(lengths[first:-1]) > 1:
            documents.pop()
        seq_length = rng.choice([1, 3, 8, 50])
        wanted = rng.randint(1, 60)
        request = (wanted, seq_length, seed)
        built = build_indexes(np.array(lengths, dtype=np.int32), np.array(documents), *request)
        order, starts, shuffle, separate = naive_indexes(lengths, documents, *request)
        assert built.documents.tolist() == order
        assert [tuple(row) for row in built.samples.tolist()] == starts
        assert built.shuffle.tolist() == shuffle
        seen.add((len(order) > len(documents), separate))
    assert seen == {(False, False), (True, False), (True, True)}


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


@pytest.mark.parametrize(
    ("text", "fractions"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("8/1/1", (0.8, 0.1, 0.1)),
        ("100", (1, 0, 0)),
        ("90,10", (0.9, 0.1, 0)),
    ],
)
def test_split_is_normalized(text: str, fractions: tuple[float, float, float]) -> None:
    assert parse_split(text) == pytest.approx(fractions)


@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        (1000, [(0, 969), (969, 999), (999, 1000)]),
        (10, [(0, 10), (10, 10), (10, 10)]),
        (25, [(0, 24), (24, 25), (25, 25)]),
        (1083, [(0, 1050), (1050, 1082), (1082, 1083)]),  # megatron-core: 1049, 1082
    ],
)
def test_split_bounds_are_rounded_as_in_the_forks(size: int, bounds: list[tuple[int, int]]) -> None:
    assert split_bounds(parse_split("969,30,1"), size) == bounds


@pytest.mark.parametrize(
    ("text", "size", "bounds"),
    [
        ("969,30,1", 1050, [(0, 1017), (1017, 1049), (1049, 1050)]),
        ("969,30,1", 1083, [(0, 1049), (1049, 1082), (1082, 1083)]),
        ("90,5,5", 25, [(0, 22), (22, 24), (24, 25)]),
    ],
)
def test_split_bounds_can_be_those_of_megatron_core(
    text: str, size: int, bounds: list[tuple[int, int]]
) -> None:
    assert split_bounds(parse_split(text), size, "megatron-core") == bounds


def test_sources_of_a_blend_have_a_margin() -> None:
    assert samples_per_source([0.3, 0.7], 1000) == [302, 704]
