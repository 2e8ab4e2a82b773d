"""Full weights without an engine: padding, damaged and malicious files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ds.checkpoint.files.full_weights import Weights, lazy_full_weights, load_full_weights
from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.metadata import Checkpoint, DataOrder, ParallelLayout, RunRecord
from megatron_ds.config import Config, ScheduleConfig
from megatron_ds.parallel.sharding import mark_sharded
from megatron_ds.parallel.weights import ShardSpec
from megatron_ds.train_state import TrainState
from tests.problems import raises_problem

CONFIG = Config(schedule=ScheduleConfig(micro_batch_size=1))


def read_weights(path: Path, stage: int) -> Weights:
    run = RunRecord(
        state=TrainState(),
        config={},
        layout=ParallelLayout(1, 1, stage, "fp32", "adam", False, False, 0),
        data_order=DataOrder.of(CONFIG, 1),
        shards={},
        branch=Lineage.new(),
    )
    opened = lazy_full_weights(Checkpoint(path, run))
    return {name: tensor.read() for name, tensor in opened.items()}


class Trap:
    """Calls a function when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_file_cannot_run_code(tmp_path: Path, stage: int) -> None:
    trap = tmp_path / "sprung"
    for name in ("mp_rank_00_model", "zero_pp_rank_0_mp_rank_00_optim"):
        torch.save({"trap": Trap(trap)}, tmp_path / f"{name}_states.pt")

    with pytest.raises(ValueError, match=r"(?s)_states.pt cannot be read.*mkdir"):
        read_weights(tmp_path, stage)

    assert not trap.exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"weight": torch.randn(100)}}, path)
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ValueError, match=r"mp_rank_00_model_states.pt cannot be read"):
        read_weights(tmp_path, 0)


class Model(nn.Module):
    """A vocabulary table, a sharded matrix and a replicated vector of rank 1 of 2."""

    def __init__(self, rows: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Module()
        self.embedding.word = nn.Embedding(rows // 2, 3)
        mark_sharded(self.embedding.word.weight, ShardSpec(0, (rows,)))
        self.fc = nn.Linear(4, 2)
        mark_sharded(self.fc.weight, ShardSpec(0, (4,)))


def weights_of_model(rows: int = 12) -> Weights:
    return {
        "embedding.word.weight": torch.arange(1.0, 3 * rows + 1).view(rows, 3),
        "fc.weight": torch.arange(16.0).view(4, 4),
        "fc.bias": torch.tensor([5.0, 6.0]),
    }


@pytest.mark.parametrize("rows", [10, 14])
def test_vocabulary_tables_are_truncated_or_padded_with_zeros(rows: int) -> None:
    model = Model()
    weights = weights_of_model(rows)

    load_full_weights(model, weights.items(), rank=1, size=2)

    table = torch.cat([weights["embedding.word.weight"], torch.zeros(4, 3)])[6:12]
    assert torch.equal(model.embedding.word.weight, table)
    assert torch.equal(model.fc.weight, weights["fc.weight"][2:])


@pytest.mark.parametrize(
    ("name", "shape"), [("fc.weight", (2, 4)), ("embedding.word.weight", (12, 4))]
)
def test_other_shapes_are_rejected(name: str, shape: tuple[int, ...]) -> None:
    """Only vocabulary tables are padded, and only in rows."""
    weights = {**weights_of_model(), name: torch.zeros(shape)}
    with raises_problem("weights-shape-mismatch", contains=f"{name} is {[*shape]}"):
        load_full_weights(Model(), weights.items(), rank=0, size=2)


def test_missing_and_unknown_names_are_reported_together() -> None:
    weights = weights_of_model()
    weights["fc.biases"] = weights.pop("fc.bias")

    with raises_problem("weights-names-mismatch") as raised:
        load_full_weights(Model(), weights.items(), rank=0, size=2)
    assert "['fc.bias']" in str(raised.problem)
    assert "['fc.biases']" in str(raised.problem)


def test_values_are_converted_to_the_dtype_of_the_model() -> None:
    model = Model().bfloat16()
    weights = weights_of_model()
    load_full_weights(model, weights.items(), rank=0, size=2)
    assert model.fc.weight.dtype == torch.bfloat16
