"""Megatron's order of a blend, against its rule position by position."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ds.config import DataConfig
from megatron_ds.data.blend import blend_schedule, megatron_blend
from megatron_ds.data.blend.blend_schedule import blend_order, order_version
from megatron_ds.data.blend.blended_dataset import BlendOrder
from megatron_ds.data.blend.megatron_blend import core_samples_per_source, normalized
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.data.index_cache import ArrayCache
from tests.proofs.cases import rotated, with_proofs
from tests.token_files import write_pair
from tests.unit.data.test_blend_schedule import WEIGHTS
from tests.unit.data.test_build_datasets import datasets

GOLDEN = {
    (5.0, 3.0, 2.0): "0120102010012010201001201020100120102010",
    (7.0, 2.0, 0.5, 0.5): "0102003010001000100001020030100010001000",
    (1.0, 1.0, 1.0): "0120120120120120120120120120120120120120",
}
"""First sources of blends, as megatron-core orders them."""


def one_by_one(weights: list[float], size: int) -> list[int]:
    """The source that lags behind most, position after position, in double precision."""
    counts = [0] * len(weights)
    found = []
    for position in range(size):
        lags = [
            weight * max(float(position), 1.0) - float(count)
            for weight, count in zip(weights, counts, strict=True)
        ]
        source = lags.index(max(lags))
        counts[source] += 1
        found.append(source)
    return found


def sources(order: BlendOrder) -> list[int]:
    return [order.locate(position)[0] for position in range(len(order))]


@pytest.mark.parametrize("weights", GOLDEN)
def test_the_order_is_that_of_megatron_core(weights: tuple[float, ...]) -> None:
    """Claim (samples): `--blend-order megatron` is Megatron's rule position by position"""
    order = blend_order(normalized(weights), 40, rule="megatron")
    assert "".join(map(str, sources(order))) == GOLDEN[weights]


@pytest.mark.parametrize(("name", "block"), with_proofs(*rotated(WEIGHTS, (61, 1024))))
def test_parts_equal_the_sequential_order(
    monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    """Claim (samples): `--blend-order megatron` is Megatron's rule position by position"""
    weights = normalized(WEIGHTS[name])
    monkeypatch.setattr(blend_schedule, "BLOCK", block)
    monkeypatch.setattr(megatron_blend, "SHORTEST_PART", 64)
    size = 1300 if len(weights) < 50 else 200
    order = blend_order(weights, size, rule="megatron")

    expected = one_by_one(weights, size)

    places = list(map(order.locate, range(size)))
    assert [source for source, _ in places] == expected
    for end in (0, 1, 60, 61, 62, size - 1, size):
        found = np.bincount(expected[:end], minlength=len(weights))
        assert order.counts_at(end).tolist() == found.tolist()
    samples: dict[int, list[int]] = {}
    for source, sample in places:
        samples.setdefault(source, []).append(sample)
    assert all(each == list(range(len(each))) for each in samples.values())


@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(1, 400), st.integers(1, 9)
)
def test_random_weights(parts: list[int], size: int, length: int) -> None:
    weights = normalized(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_blend, "SHORTEST_PART", length)
        patch.setattr(blend_schedule, "BLOCK", 128)
        assert sources(blend_order(weights, size, rule="megatron")) == one_by_one(weights, size)


def test_wrong_guesses_are_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part is first computed as if one source had given all samples before it."""
    weights = normalized([0.6, 0.39, 0.009, 0.001])

    def guess(self: object, positions: np.ndarray) -> np.ndarray:
        counts = np.zeros((len(positions), 4))
        counts[:, 3] = positions
        return counts

    monkeypatch.setattr(megatron_blend.GreedyModel, "_guess", guess)
    monkeypatch.setattr(megatron_blend, "SHORTEST_PART", 16)
    monkeypatch.setattr(blend_schedule, "BLOCK", 256)
    assert sources(blend_order(weights, 1500, rule="megatron")) == one_by_one(weights, 1500)


def test_counts_are_cached_apart_from_those_of_the_fair_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blend_schedule, "BLOCK", 16)
    cache = ArrayCache([tmp_path])
    weights = [0.5, 0.3, 0.2]
    for rule in ("fair", "megatron"):
        blend_order(weights, 100, cache, rule)
    assert len(list(tmp_path.glob("*.json"))) == 2
    assert order_version("fair") != order_version("megatron") == order_version("megatron-deepspeed")


def test_samples_that_are_requested() -> None:
    """Rounded up twice by Megatron Core; a sample more may be an epoch more, in another order."""
    assert core_samples_per_source([0.3, 0.7], 1000) == [302, 704]
    assert core_samples_per_source([0.25, 0.75], 801) == [203, 605]


def blended(folder: Path, rule: str, *, weighted: bool = True) -> tuple[Datasets, DataConfig]:
    paths = [
        write_pair(folder / name, ([first + number] * 7 for number in range(40)))
        for name, first in (("a", 0), ("b", 100), ("c", 200))
    ]
    if weighted:
        paths = [word for pair in zip("532", paths, strict=True) for word in pair]
    config = DataConfig(data_path=tuple(paths), split="1", blend_order=rule)
    return datasets(config, (100, 0, 0)), config


def ids(built: Datasets, first: int = 0) -> list[str]:
    return [built.train.sample_id(at) for at in range(first, len(built.train))]


def test_a_run_reads_its_files_in_this_order(tmp_path: Path) -> None:
    built, config = blended(tmp_path, "megatron")
    expected = one_by_one(normalized([5, 3, 2]), 100)
    assert [int(each.partition("/")[0]) for each in ids(built)] == expected

    history = built.progress.history_after(37)
    resumed = datasets(config, (100, 0, 0), history=history, consumed=37)
    assert not resumed.changes
    assert ids(resumed) == ids(built)


def test_another_order_on_a_resume_continues_every_file(tmp_path: Path) -> None:
    fair, config = blended(tmp_path, "fair")
    history = fair.progress.history_after(50)
    config = dataclasses.replace(config, blend_order="megatron")
    changed = datasets(config, (100, 0, 0), history=history, consumed=50)
    assert "blend-schedule-changed" in changed.changes[0]
    found = ids(changed, 50)
    assert [int(each.partition("/")[0]) for each in found] == one_by_one([0.5, 0.3, 0.2], 50)
    assert not {*found} & {*ids(fair)[:50]}
    assert changed.progress.history.current.first_sample == 50


def test_files_without_weights_are_read_for_one_epoch(tmp_path: Path) -> None:
    built, _ = blended(tmp_path, "megatron", weighted=False)
    # 280 tokens make 55 samples of 5 tokens and a label.
    assert [usage.samples for usage in built.usage] == [34, 33, 33]
    requests = [source.requests for source in built.progress.history.sources]
    assert requests == [(55,)] * 3
