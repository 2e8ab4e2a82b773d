"""Full weights without an engine: reading, loading, padding, and malicious files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn

from megatron_ds.checkpoint.full_weights import Weights, lazy_full_weights, load_full_weights
from megatron_ds.checkpoint.lineage import Branch
from megatron_ds.checkpoint.metadata import (
    CheckpointMetadata,
    DataOrder,
    ParallelLayout,
    RunRecord,
    ShardRecord,
)
from megatron_ds.config import Config, ScheduleConfig
from megatron_ds.engine.deepspeed.partitions import FlatPartition, ParameterPlace
from megatron_ds.parallel.sharding import ShardSpec, mark_sharded, take_shard
from megatron_ds.train_state import TrainState
from tests.problems import raises_problem

CONFIG = Config(schedule=ScheduleConfig(micro_batch_size=1))


def checkpoint_of(
    path: Path,
    *,
    stage: int,
    tp: int,
    dp: int,
    shards: dict[str, ShardSpec],
    precision: str = "fp32",
    partitions: tuple[FlatPartition, ...] = (),
) -> CheckpointMetadata:
    run = RunRecord(
        state=TrainState(),
        config={},
        layout=ParallelLayout(tp, dp, stage, precision, "adam", False, False, 0),
        data_order=DataOrder.of(CONFIG, dp),
        shards={name: ShardRecord(s.dim, s.sections) for name, s in shards.items()},
        branch=Branch.new(),
        partitions=partitions,
    )
    return CheckpointMetadata(path, run)


def read_weights(checkpoint: CheckpointMetadata) -> Weights:
    return {name: tensor.read() for name, tensor in lazy_full_weights(checkpoint).items()}


def full_weights() -> Weights:
    generator = torch.Generator().manual_seed(1)
    shapes = {"fused": (12, 5), "columns": (3, 8), "whole": (7,), "scalar": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


SHARDS = {"fused": ShardSpec(0, (8, 2, 2)), "columns": ShardSpec(1, (8,))}


def parts_of(weights: Weights, rank: int, size: int) -> Weights:
    return {
        name: take_shard(value, SHARDS[name], rank, size) if name in SHARDS else value
        for name, value in weights.items()
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_zero_0_to_2_shards_are_joined(tmp_path: Path, tp: int) -> None:
    weights = full_weights()
    for rank in range(tp):
        content = {"module": parts_of(weights, rank, tp), "ds_version": "0.19.8"}
        torch.save(content, tmp_path / f"mp_rank_{rank:02d}_model_states.pt")

    read = read_weights(checkpoint_of(tmp_path, stage=1, tp=tp, dp=3, shards=SHARDS))

    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def write_zero3(
    folder: Path,
    weights: Weights,
    dp: int,
    groups: list[list[list[str]]],
    stem: str,
    precision: str,
) -> tuple[FlatPartition, ...]:
    """ZeRO-3's files of one tensor-parallel rank; returns the places in them.

    groups: parameter names, by optimizer group and flat tensor.
    """
    partitions = []
    for flat in (flat for group in groups for flat in group):
        places, offset = [], 0
        for name in flat:
            places.append(ParameterPlace(name, tuple(weights[name].shape), offset))
            offset += -(-weights[name].numel() // dp)
        partitions.append(FlatPartition(offset, tuple(places)))
    for rank in range(dp):
        flats = []
        for flat in (flat for group in groups for flat in group):
            slices = []
            for name in flat:
                size = -(-weights[name].numel() // dp)
                padded = torch.zeros(size * dp)
                padded[: weights[name].numel()] = weights[name].flatten()
                slices.append(padded[rank * size : (rank + 1) * size])
            flats.append(torch.cat(slices))
        base = f"zero_pp_rank_{rank}_{stem}"
        states = {"fp32_flat_groups": flats, "loss_scaler": LossScaler(1.0)}
        torch.save({}, folder / f"{base}_model_states.pt")
        prefix = "bf16_" if precision == "bf16" else ""
        torch.save({"optimizer_state_dict": states}, folder / f"{prefix}{base}_optim_states.pt")
    return tuple(partitions)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize(
    "groups",
    [
        [[["fused", "columns"]], [["whole"]]],
        # A flat tensor per parameter, as with a small sub_group_size.
        [[["columns"], ["fused"]], [["whole"]]],
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero3_partitions_are_joined(
    tmp_path: Path, tp: int, dp: int, groups: list[list[list[str]]], precision: str
) -> None:
    weights = full_weights()
    del weights["scalar"]  # no parameter is one
    for rank in reversed(range(tp)):
        stem = f"mp_rank_{rank:02d}"
        places = write_zero3(tmp_path, parts_of(weights, rank, tp), dp, groups, stem, precision)
    options = {"tp": tp, "dp": dp, "shards": SHARDS, "precision": precision, "partitions": places}
    read = read_weights(checkpoint_of(tmp_path, stage=3, **options))

    assert read.keys() == weights.keys()
    for name, value in weights.items():
        assert read[name].shape == value.shape
        assert torch.equal(read[name], value)


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
        read_weights(checkpoint_of(tmp_path, stage=stage, tp=1, dp=1, shards={}))

    assert not trap.exists()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": full_weights()}, path)
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ValueError, match=r"mp_rank_00_model_states.pt cannot be read"):
        read_weights(checkpoint_of(tmp_path, stage=0, tp=1, dp=1, shards={}))


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


def test_each_rank_loads_its_shard() -> None:
    model, weights = Model(), weights_of_model()

    load_full_weights(model, weights.items(), rank=1, size=2)

    assert torch.equal(model.embedding.word.weight, weights["embedding.word.weight"][6:])
    assert torch.equal(model.fc.weight, weights["fc.weight"][2:])
    assert torch.equal(model.fc.bias, weights["fc.bias"])


@pytest.mark.parametrize("rows", [10, 14])
def test_vocabulary_tables_are_truncated_or_padded_with_zeros(rows: int) -> None:
    model, weights = Model(), weights_of_model(rows)

    load_full_weights(model, weights.items(), rank=1, size=2)

    table = torch.cat([weights["embedding.word.weight"], torch.zeros(4, 3)])[6:12]
    assert torch.equal(model.embedding.word.weight, table)


def test_only_vocabulary_tables_are_padded() -> None:
    weights = weights_of_model()
    weights["fc.weight"] = weights["fc.weight"][:2]

    with raises_problem("weights-shape-mismatch", contains="fc.weight"):
        load_full_weights(Model(), weights.items(), rank=0, size=2)


def test_a_wrong_width_is_rejected() -> None:
    weights = weights_of_model()
    weights["embedding.word.weight"] = torch.zeros(12, 4)

    with raises_problem("weights-shape-mismatch", contains="embedding.word.weight is [12, 4]"):
        load_full_weights(Model(), weights.items(), rank=0, size=2)


def test_missing_and_unknown_names_are_reported_together() -> None:
    weights = weights_of_model()
    weights["fc.biases"] = weights.pop("fc.bias")

    with raises_problem("weights-names-mismatch") as raised:
        load_full_weights(Model(), weights.items(), rank=0, size=2)
    assert "['fc.bias']" in raised.problem
    assert "['fc.biases']" in raised.problem


def test_values_are_converted_to_the_dtype_of_the_model() -> None:
    model, weights = Model().bfloat16(), weights_of_model()
    load_full_weights(model, weights.items(), rank=0, size=2)
    assert model.fc.weight.dtype == torch.bfloat16
