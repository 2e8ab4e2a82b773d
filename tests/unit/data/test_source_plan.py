"""The plan of each source of a blend: requested samples, the version of the order, usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import DataConfig
from megatron_ds.data.build_datasets import Datasets, exact_train_samples
from megatron_ds.data.validation import DataFiles
from tests.token_files import write_pair
from tests.unit.data.test_build_datasets import datasets


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 40 documents of 7 tokens, which give 55 samples in an epoch and 111 in two."""
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        write_pair(name, ([number] * 7 for number in range(40)))


def built(words: str, samples: int, before: Datasets | None = None, **values: Any) -> Datasets:
    """The datasets of a run that reads 40 samples of another one first, if that is given."""
    config = DataConfig(data_path=tuple(words.split()), split="1", **values)
    consumed = 0 if before is None else 40
    history = before and before.progress and before.progress.history_after(consumed)
    return datasets(config, (samples, 0, 0), history=history, consumed=consumed)


def requests_of(data: Datasets) -> list[tuple[int, ...]]:
    assert data.progress is not None
    return [source.requests for source in data.progress.history.sources]


@pytest.mark.parametrize(
    ("order", "words", "requests"),
    [
        ("fair", "1 a 3 b", (202, 604)),  # 0.5 % more than 200.25 and 600.75
        ("megatron-deepspeed", "1 a 3 b", (202, 604)),
        ("megatron", "1 a 3 b", (203, 605)),  # rounded up twice
        ("fair", "a b", (403, 403)),
        ("megatron-deepspeed", "a b", (403, 403)),
        ("megatron", "a b", (401, 400)),  # an epoch of 55, or what the order takes
        ("fair", "a", (801,)),  # not of a blend
        ("fair", "1 a", (806,)),
    ],
)
def test_requests_follow_the_rule_of_the_blend(
    order: str, words: str, requests: tuple[int, ...]
) -> None:
    assert requests_of(built(words, 801, blend_order=order)) == [(one,) for one in requests]


@pytest.mark.parametrize(("words", "samples"), [("a", 111), ("1 a 1 b", 221), ("a b", 222)])
def test_exact_epochs_request_no_further_epoch(words: str, samples: int) -> None:
    values = {"train_data_exact_num_epochs": 2}
    config = DataConfig(data_path=tuple(words.split()), split="1", **values)
    assert exact_train_samples(DataFiles(config), 5, 2) == samples
    assert {*requests_of(built(words, samples, **values))} == {(111,)}


def test_the_order_of_a_single_file_has_one_version() -> None:
    """A change of --blend-order changes nothing for it, and is not reported."""
    first = built("a", 60, blend_order="megatron")
    assert built("a", 60, first, blend_order="fair").changes == ()
    assert built("1 a 1 b", 60, first, blend_order="fair").changes


def test_usage_counts_the_samples_of_earlier_blends() -> None:
    first = built("3 a 1 b", 80)  # 30 and 10 of 40 samples
    (c, a) = built("1 c 3 a", 80, first).usage
    assert [(one.prefix, one.samples) for one in (c, a)] == [("c", 10), ("a", 30 + 30)]
    assert a.epochs == 60 * 5 / 280
