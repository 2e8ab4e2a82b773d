"""Parts of the ZeRO engine that need no DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.zero import _read_step
from megatron_ds.train_state import StepPlan
from tests.problems import raises_problem


def batches(count: int) -> Iterator[DeviceBatch]:
    for position in range(count):
        tokens = torch.zeros(1, 4, dtype=torch.int64)
        yield DeviceBatch(tokens, tokens, torch.ones(1, 4), position)


PLAN = StepPlan(
    iteration=7, num_micro_batches=3, global_batch_size=3, seq_length=2, lr=0.1, weight_decay=0.0
)


@pytest.mark.parametrize("count", [3, 4])
def test_step_reads_its_micro_batches_truncated(count: int) -> None:
    read = list(_read_step(batches(count), PLAN))

    assert [batch.position for batch in read] == [0, 1, 2]
    assert read[0].tokens_BS.shape == (1, 2)


def test_data_that_ends_within_a_step_is_an_error() -> None:
    with raises_problem("training-data-exhausted", contains="7"):
        list(_read_step(batches(2), PLAN))
