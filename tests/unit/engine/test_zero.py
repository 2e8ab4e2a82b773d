"""Parts of an engine that need no DeepSpeed engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from megatron_ds.config import Config, OptimizerConfig
from megatron_ds.engine.deepspeed.checkpoint_io import load_checkpoint
from megatron_ds.engine.device_batches import DeviceBatch
from megatron_ds.engine.norms import ModelNorms, sum_of_squares
from megatron_ds.engine.step import StepControl, _read_step
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.train_state import StepPlan
from tests.observed import Observed
from tests.problems import raises_problem

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("norm", [0.0, 0.5, 4.0])
def test_clipping_never_enlarges_gradients(norm: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([norm, 0.0])
    steps: Any = object.__new__(StepControl)
    steps._engine = SimpleNamespace(gradient_clipping=lambda: 1.0)
    steps.norms = SimpleNamespace(parameters=(("weight", parameter),))
    steps._norm = torch.tensor(norm, dtype=torch.float64)
    steps._clip_gradients()
    assert parameter.grad.tolist() == pytest.approx([min(norm, 1.0), 0.0], abs=1e-6)


def test_per_token_loss_of_a_step_without_counted_tokens_is_zero() -> None:
    steps: Any = object.__new__(StepControl)
    config = Config(optimizer=OptimizerConfig(calculate_per_token_loss=True))
    steps.parts = SimpleNamespace(config=config, mesh=Mesh.single(), device=CPU)
    masked = (batch._replace(loss_weights_BS=torch.zeros(1, 4)) for batch in batches(3))
    factors = [factor for _, factor in steps.micro_batches(masked, PLAN)]
    assert [float(0.0 * factor) for factor in factors if factor is not None] == [0.0] * 3


def test_sum_of_squares_is_exact_enough_over_types_and_sizes() -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (0, 1, 7, 100_003, 3_000_001)
    tensors = [torch.randn(size, generator=generator) * 10**3 for size in sizes]
    tensors += [tensor.bfloat16() for tensor in tensors]
    exact = sum(tensor.double().square().sum() for tensor in tensors)
    torch.testing.assert_close(sum_of_squares(tensors, CPU), exact, rtol=1e-8, atol=0)
    assert sum_of_squares([], CPU) == 0
    assert not sum_of_squares([torch.tensor([1.0, torch.inf])], CPU).isfinite()


@pytest.mark.parametrize("value", [1e-25, 1e25])
@pytest.mark.parametrize("size", [3, 1000])
def test_sum_of_squares_on_a_cpu_has_the_range_of_fp64(value: float, size: int) -> None:
    squares = sum_of_squares([torch.full([size], value)], CPU)
    torch.testing.assert_close(squares.sqrt() / value, torch.tensor(size).double().sqrt())


def test_sum_of_squares_needs_no_operator_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator is a launch on an accelerator; there, the norms of a list are one."""
    monkeypatch.setattr("megatron_ds.engine.norms.is_host", lambda device: False)
    counts = []
    for number in (2, 500):
        tensors = [torch.ones(3) for _ in range(number)]
        operators: list[object] = []
        with Observed(lambda operator, *_, called=operators: called.append(operator)):
            squares = sum_of_squares(tensors, CPU)
        assert float(squares) == pytest.approx(3 * number)
        counts.append(len(operators))
    assert counts[0] == counts[1] < 20


@pytest.mark.parametrize("status", ["AVAILABLE", "NOT_AVAILABLE"])
@pytest.mark.parametrize(("rank", "own"), [(0, [1.0, 2.0, 3.0, 4.0]), (2, [1.0, 2.0]), (3, [])])
def test_padding_of_a_zero3_partition_is_not_part_of_the_parameter(
    rank: int, own: list[float], status: str, tmp_path: Path
) -> None:
    """Ten elements on four ranks; the memory behind the last element is not initialized.

    The partition may be in a file, whose length is a multiple of the block of the disk.
    """
    norms = object.__new__(ModelNorms)
    norms._stage = 3
    norms._mesh = dataclasses.replace(Mesh.single(), replicas=Group((0, 1, 2, 3), rank, None))
    partition: Any = torch.tensor([1.0, 2.0, 3.0, 4.0])
    parameter = SimpleNamespace(ds_numel=10, ds_tensor=partition)
    if status == "NOT_AVAILABLE":
        (tmp_path / "swapped").write_bytes(partition.numpy().tobytes() + bytes(1008))
        get_path = Mock(return_value=str(tmp_path / "swapped"))
        parameter.nvme_swapper = SimpleNamespace(get_path=get_path, dtype=torch.float32)
        partition = torch.tensor(1.0).half()
        parameter.ds_tensor = partition
    partition.status = SimpleNamespace(name=status)
    partition.ds_numel = 4
    assert norms._own_partition(parameter).tolist() == own


def test_weights_of_other_shapes_are_named_with_both() -> None:
    saved = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).state_dict()
    del saved["1.bias"]
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6))
    engine = SimpleNamespace(load_checkpoint=lambda folder, tag: model.load_state_dict(saved))
    differences = '1.weight is [5, 4], the model\'s [6, 4]; Missing key(s) in state_dict: "1.bias"'
    with raises_problem("checkpoint-shapes-differ", "load", contains="run/global_step4 does not"):
        load_checkpoint(engine, Path("run"), "global_step4")
    with raises_problem("checkpoint-shapes-differ", "load", contains=differences):
        load_checkpoint(engine, Path("run"), "global_step4")
