"""The order of a blend: each share at every prefix, and block by block the same as one by one."""

from __future__ import annotations

import heapq
import math
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.data.blend import blend_schedule as module
from megatron_ds.data.blend.blend_schedule import NEVER, blend_order
from megatron_ds.data.blend.blended_dataset import BlendOrder
from megatron_ds.data.index_cache import ArrayCache
from megatron_ds.data.sample_index import samples_per_source
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables

TABLES = tables(__file__)

WEIGHTS = TABLES["weights"]


def one_by_one(weights: list[float], size: int) -> list[int]:
    """The most urgent of what is released, position after position from 1 on."""
    steps = [1 / weight if weight * NEVER > 1 else NEVER for weight in weights]
    waiting = [(1, number, 1) for number in range(len(weights))]  # released, source, sample
    ready: list[tuple[int, int, int]] = []  # due, source, sample
    heapq.heapify(waiting)
    source = []
    for at in range(1, size + 1):
        while waiting and (waiting[0][0] <= at or not ready):
            _, number, sample = heapq.heappop(waiting)
            heapq.heappush(ready, (math.ceil(sample * steps[number]), number, sample))
        _, number, sample = heapq.heappop(ready)
        source.append(number)
        heapq.heappush(waiting, (math.floor(sample * steps[number]) + 1, number, sample + 1))
    return source


def read(order: BlendOrder) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    found = np.array([order.locate(position) for position in range(len(order))])
    return found[:, 0], found[:, 1]


def check_shares(weights: list[float], source: npt.NDArray[np.integer]) -> None:
    positions = np.arange(1, len(source) + 1)
    for number, weight in enumerate(weights):
        assert np.abs(np.cumsum(source == number) - weight * positions).max() < 1 + 1e-9


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_prefix_is_within_one_sample_of_its_share(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Claim (samples): in a blend, the samples of each source are within one of its weight at every
    step"""
    weights = WEIGHTS[name]
    monkeypatch.setattr(module, "BLOCK", 700)
    order = blend_order(weights, 3000)
    source, sample = read(order)
    check_shares(weights, source)
    for number in range(len(weights)):
        own = sample[source == number]
        assert own.tolist() == list(range(len(own)))
    for end in (0, 1, 700, 1000, 2100, 2999, 3000):
        assert (
            order.counts_at(end).tolist()
            == np.bincount(source[:end], minlength=len(weights)).tolist()
        )
    assert (order.counts_at(3000) <= samples_per_source(weights, 3000)).all()
    shorter, _ = read(blend_order(weights, 1500))
    assert (shorter == source[:1500]).all(), "a longer run begins with the shorter one"


@pytest.mark.parametrize(("name", "block"), with_proofs(*rotated(WEIGHTS, (1, 61, 1024, 5000))))
def test_blocks_equal_the_sequential_order(
    monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    weights = WEIGHTS[name]
    size = 60 if block == 1 else 2500
    monkeypatch.setattr(module, "BLOCK", block)
    assert read(blend_order(weights, size))[0].tolist() == one_by_one(weights, size)


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=30).filter(any),
    st.integers(1, 300),
    st.integers(1, 50),
)
def test_random_weights(parts: list[int], size: int, block: int) -> None:
    weights = [part / sum(parts) for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        source, _ = read(blend_order(weights, size))
    check_shares(weights, source)
    assert not {number for number, part in enumerate(parts) if not part} & set(source.tolist())


@given(
    st.lists(st.floats(1e-12, 1), min_size=1, max_size=20), st.integers(1, 200), st.floats(0.5, 2)
)
def test_weights_with_rounded_sum(weights: list[float], size: int, factor: float) -> None:
    """Shares are off then, but every position has a source, and every source its samples."""
    weights = [weight * factor / sum(weights) for weight in weights]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", 17)
        source, sample = read(blend_order(weights, size))
    for number in range(len(weights)):
        own = sample[source == number]
        assert own.tolist() == list(range(len(own)))


def test_distant_positions_keep_their_shares() -> None:
    """Beyond 2^31 and 2^32 positions, from counts that stand for all before them."""
    weights = np.random.RandomState(3).dirichlet(np.full(40, 0.5)).tolist()
    for far in (2**31 - 500, 2**32 - 500, 10**12):
        jobs = module._DeadlineModel(weights)
        exact = np.array(weights) * far
        before = np.floor(exact).astype(np.int64)
        urgent = np.argsort(exact - before)[len(weights) - (far - int(before.sum())) :]
        before[urgent] += 1
        after = jobs._counts_after(far, before, far + 1000)
        source = jobs.order(far, before, after)
        given_so_far = before + np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
        positions = np.arange(far + 1, far + 1001)
        # Which of the samples that might have come by `far` have come was guessed above.
        off = np.abs(given_so_far - positions[:, None] * np.array(weights))
        assert off.max() < 2
        assert off[200:].max() < 1 + 1e-3


def test_counts_are_wide_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module._DeadlineModel, "_counts_after", lambda self, start, before, end: before
    )
    jobs = module._DeadlineModel([0.5, 0.5])
    assert jobs.counts(2**31 - 1).dtype == np.int32
    assert jobs.counts(2**31).dtype == np.int64


def test_counts_of_a_long_order_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 16)
    cache = ArrayCache([tmp_path])
    weights = [0.25, 0.75]
    blend_order(weights, 16, cache)
    assert not list(tmp_path.iterdir())
    first = blend_order(weights, 100, cache)
    monkeypatch.setattr(module._DeadlineModel, "counts", None)
    again = blend_order(weights, 100, cache)
    size = len(pickle.dumps(again))
    assert again.counts_at(100).tolist() == [25, 75]
    positions = (0, 99, 3, 50, 15, 16, 17)
    for order in (again, pickle.loads(pickle.dumps(again))):
        assert [order.locate(p) for p in positions] == [first.locate(p) for p in positions]
    assert len(pickle.dumps(again)) == size, "computed blocks are not pickled"
    assert len(list(tmp_path.glob("*.json"))) == 1


@pytest.mark.parametrize("count", [0, 32768])
def test_invalid_number_of_sources_is_rejected(count: int) -> None:
    with pytest.raises(ValueError, match=str(count)):
        blend_order([1 / max(count, 1)] * count, 5)
