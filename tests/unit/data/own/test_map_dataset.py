"""Own datasets: their order, what is checked of an item, and which splits a run has.

Claim (extension): a resumed run on an own dataset continues bit for bit, and reads every item once
per epoch; masked tokens have no loss
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ds.data.build_datasets import Datasets
from megatron_ds.data.own.dataset_request import DatasetRequest
from megatron_ds.data.own.map_dataset import MapDataset, MockDataset, build_own_datasets
from megatron_ds.data.sample import Mark
from megatron_ds.data.token_dataset import SampleReading
from megatron_ds.tokenizer.null import NullTokenizer
from tests.problems import raises_problem

TOKENIZER = NullTokenizer(9)


def request(samples: int = 20, split: str = "train") -> DatasetRequest:
    return DatasetRequest(split, samples, seq_length=2, seed=1, tokenizer=TOKENIZER)


def build(
    items: Sequence[Any] | None, splits: tuple[str, ...] = ("train",), **changed: Any
) -> Datasets:
    settings = {"seq_length": 2, "seed": 1, "num_samples": (20, 4, 4), "tokenizer": TOKENIZER}
    settings |= {"history": None, "consumed": 0, **changed}
    return build_own_datasets(lambda asked: items if asked.split in splits else None, **settings)


def test_every_epoch_has_all_items_in_an_order_of_its_own() -> None:
    dataset = MapDataset([[n, n, n] for n in range(8)], request(24))
    read = [int(dataset[position][0]) for position in range(24)]
    epochs = [read[start : start + 8] for start in (0, 8, 16)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(8)]] * 3
    assert len(set(map(tuple, epochs))) == 3
    assert [int(dataset[position][0]) for position in (17, 3, 9)] == [read[17], read[3], read[9]]


def read(item: Any) -> tuple[list[int], list[int]]:
    """The token ids of an item, and 1 for each that has a loss as a label, else 0."""
    ids, marks = SampleReading(MapDataset([item], request()), [0]).finish()
    assert marks is not None
    return ids[0].tolist(), (marks[0] & Mark.NO_LOSS.value == 0).astype(int).tolist()


@pytest.mark.parametrize("item", [[1, 2, 3], np.array([1, 2, 3], np.uint16), torch.arange(1, 4)])
def test_items_are_lists_arrays_or_tensors(item: Any) -> None:
    assert read(item) == ([1, 2, 3], [1, 1, 1])


MASKED = [1, 2, 3], [0, 1, 0]


@pytest.mark.parametrize(
    "item",
    [
        [~1, 2, ~3],
        ([1, 2, 3], [0, 1, 0]),
        [[1, 2, 3], [False, True, False]],
        (np.array([1, 2, 3], np.uint16), np.array([0.0, 1.0, 0.0])),
        (torch.tensor([1, 2, 3]), torch.tensor([False, True, False])),
        {"input_ids": [1, 2, 3], "loss_mask": (0, 1, 0)},
        {"input_ids": [1, 2, 3], "labels": [-100, 2, -100]},
        {"labels": torch.tensor([-100, 2, -100]), "input_ids": np.array([1, 2, 3], np.uint8)},
    ],
)
def test_items_say_which_tokens_have_a_loss(item: Any) -> None:
    """Claim (extension): an own dataset masks tokens by inverted ids, a loss mask or labels of
    -100"""
    assert read(item) == MASKED


def test_a_pair_of_ids_is_no_mask() -> None:
    asked = DatasetRequest("train", 1, seq_length=1, seed=1, tokenizer=TOKENIZER)
    for item in ([1, 0], (1, 0), [torch.tensor(1), torch.tensor(0)]):
        assert MapDataset([item], asked)[0].tolist() == [1, 0]
    ids, marks = SampleReading(MapDataset([([7, 8], [1, 0])], asked), [0]).finish()
    assert (ids.tolist(), marks is not None and marks.tolist()) == ([[7, 8]], [[0, 1]])


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ([1, 2], "dataset-item-of-other-shape"),
        ([1.0, 2.0, 3.0], "dataset-item-of-other-shape"),
        ([1, [2], 3], "dataset-item-of-other-shape"),
        ([1, 2, 10], "dataset-item-outside-vocabulary"),
        ([1, -11, 2], "dataset-item-outside-vocabulary"),
        ([1, 1099511627776, 2], "dataset-item-outside-vocabulary"),
        ([1, -9223372036854775808, 2], "dataset-item-outside-vocabulary"),
        (([1, 2, 3], [1, 0]), "dataset-item-of-other-shape"),
        (([1, [2], 3], [1, 0, 1]), "dataset-item-of-other-shape"),
        (([~1, 2, 3], [1, 0, 1]), "dataset-item-outside-vocabulary"),
        (([1, 2, 3], [-100, 2, -100]), "dataset-mask-of-other-values"),
        (([1, 2, 3], [1.0, 0.5, 0.0]), "dataset-mask-of-other-values"),
        (([1, 2, 3], [1.0, float("nan"), 0.0]), "dataset-mask-of-other-values"),
        ({"input_ids": [1, 2, 3]}, "dataset-item-of-other-keys"),
        (
            {"input_ids": [1, 2, 3], "labels": [1, 2, 3], "attention_mask": [1, 1, 0]},
            "dataset-item-of-other-keys",
        ),
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "dataset-labels-differ"),
        ({"input_ids": [-100, 2, 3], "labels": [1, 2, 3]}, "dataset-item-outside-vocabulary"),
        ({"input_ids": [1, 2, 3], "labels": [1.0, 2.0, 3.0]}, "dataset-item-of-other-shape"),
    ],
)
def test_items_that_do_not_fit_are_problems(item: Any, code: str) -> None:
    with raises_problem(code):
        read(item)


def test_a_run_has_the_splits_that_are_built() -> None:
    found = build([[1, 2, 3]], ("train", "test"))
    assert found.train is not None
    assert (len(found.train), [*found.valid], [*found.test]) == (20, [], [""])
    with raises_problem("no-training-data"):
        build(None)
    assert build(None, num_samples=(0, 4, 4)).train is None


def test_a_resumed_run_needs_the_items_of_the_one_before() -> None:
    progress = build([[1, 2, 3]] * 7).progress
    assert progress is not None
    history = progress.history_after(8)
    assert history.sources[0].consumed == 8
    resumed = build([[1, 2, 3]] * 7, history=history, consumed=8).progress
    assert resumed is not None
    assert resumed.history_after(12).sources[0].consumed == 12
    with raises_problem("dataset-changed"):
        build([[1, 2, 3]] * 6, history=history, consumed=8)


def test_mock_data_is_a_function_of_seed_split_and_position() -> None:
    def tokens(seed: int, split: str) -> list[list[int]]:
        settings = {"seq_length": 5, "num_samples": (20, 20, 0), "tokenizer": NullTokenizer(99)}
        data = build_own_datasets(MockDataset, seed=seed, history=None, consumed=0, **settings)  # type: ignore[arg-type]
        dataset = data.train if split == "train" else data.valid[""]
        assert dataset is not None
        return [dataset[position].tolist() for position in (7, 0, 19)]

    first = tokens(1, "train")
    assert first == tokens(1, "train")
    assert first not in (tokens(2, "train"), tokens(1, "validation"))
    drawn = [token for row in first for token in row]
    assert len(set(drawn)) > 9
    assert max(drawn) < 100
