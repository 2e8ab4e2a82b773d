"""Which settings a resume rejects, which it reports, and which make no difference."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_ds.checkpoint.compatibility import (
    changed_settings,
    layout_changes,
    partition_conflicts,
    resume_conflicts,
)
from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.metadata import Checkpoint, DataOrder, ParallelLayout, RunRecord
from megatron_ds.cli import arguments
from megatron_ds.config import Config
from megatron_ds.engine.deepspeed.partitions import FlatPartition, ParameterPlace
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.train_state import TrainState
from tests.problems import codes
from tests.tables import tables

TABLES = tables(__file__)

FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --train-iters 10 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --data-path p --vocab-file v "
    "--merge-file m"
)
PLACES = (
    FlatPartition(48, (ParameterPlace("a", (8, 8), 0), ParameterPlace("b", (8, 4), 64))),
    FlatPartition(4, (ParameterPlace("c", (8,), 0),)),
)


def config_of(line: str, zero: dict[str, object] | None = None, folder: Path = Path()) -> Config:
    """The configuration of FLAGS with other flags and keys of `zero_optimization`."""
    words = [*FLAGS.split(), *line.split()]
    if zero is not None:
        file = folder / "ds.json"
        file.write_text(json.dumps({"zero_optimization": zero}))
        words += ["--deepspeed_config", str(file)]
    config, _ = arguments.build_config(words, world_size=1, warn=lambda line: None)
    config, problems = merge_file(config, 1)
    assert problems == []
    return config.with_vocab(100)


def saved_by(config: Config) -> Checkpoint:
    """The checkpoint of a run, as it is read from run.json."""
    run = RunRecord(
        state=TrainState(iteration=4),
        config=config.to_dict(),
        layout=ParallelLayout.of(config, 1),
        data_order=DataOrder.of(config, 1),
        shards={},
        branch=Lineage.new(),
        partitions=PLACES,
        custom_parts=config.custom_parts,
    )
    values = json.loads(json.dumps(run.to_dict()))
    return Checkpoint(Path("saved/global_step4"), RunRecord.from_dict(values))


@pytest.mark.parametrize(("part", "line", "rejects", "reports"), TABLES["functions"])
def test_functions_of_a_program_are_compared(
    part: str, line: str, rejects: bool, reports: bool
) -> None:
    builtin = config_of(line)
    own = dataclasses.replace(builtin, custom_parts={part: "__main__.own"})
    for before, now in ((builtin, own), (own, builtin)):
        found = saved_by(before)
        changed = ["resume-part-changed"]
        assert codes(resume_conflicts(found, now, 1)) == changed * rejects
        assert codes(changed_settings(found, now, 1)) == changed * reports
    assert resume_conflicts(saved_by(own), own, 1) == []


def compare(before: Config, now: Config) -> tuple[list[str], list[str]]:
    """The fields that are rejected, and those that are reported."""
    found = saved_by(before)
    rejected = resume_conflicts(found, now, 1)
    reported = changed_settings(found, now, 1)
    assert set(codes(reported)) <= {"resume-setting-changed"}
    return [each.fields[0] for each in rejected], [each.fields[0] for each in reported]


@pytest.mark.parametrize(("before", "now"), TABLES["equal_in_effect"])
def test_equal_values_in_effect_make_no_difference(before: str, now: str) -> None:
    assert compare(config_of(before), config_of(now)) == ([], [])
    assert compare(config_of(now), config_of(before)) == ([], [])


@pytest.mark.parametrize(("line", "reported"), TABLES["changes"])
def test_changes_that_affect_training_are_reported_with_both_values(
    line: str, reported: list[str]
) -> None:
    before = config_of("")
    now = config_of(line)
    assert compare(before, now) == ([], reported)
    assert compare(now, before) == ([], reported)
    name, value = line.split()[-2:] if line.split()[-1][0] != "-" else (line.split()[-1], "True")
    warning = next(
        each for each in changed_settings(saved_by(before), now, 1) if name in each.render()
    )
    assert value in str(warning) or f"{float(value):g}" in str(warning)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_other_micro_batches_are_reported_since_their_tokens_share_scales(recipe: str) -> None:
    before = config_of(f"--fp8-format hybrid --fp8-recipe {recipe}")
    now = config_of(f"--fp8-format hybrid --fp8-recipe {recipe} --micro-batch-size 2")
    assert compare(before, now) == ([], ["micro_batch_size"])
    assert changed_settings(saved_by(before), before, 2) == []  # the same with another rank


@pytest.mark.parametrize("role", ["prefix", "suffix", "middle", "pad", "eod"])
def test_other_tokens_of_fill_in_the_middle_are_reported(role: str) -> None:
    before = config_of("--fim-data")
    now = config_of(f"--fim-data --fim-{role}-token <other>")
    assert compare(before, now) == ([], [f"fim_{role}_token"])
    assert compare(config_of(""), config_of(f"--fim-{role}-token <other>")) == ([], [])


def test_dynamic_and_static_loss_scales_are_compared_by_what_they_use() -> None:
    dynamic = config_of("--fp16 --hysteresis 4")
    static = config_of("--fp16 --loss-scale 128")
    assert compare(dynamic, static) == ([], ["loss_scale"])
    assert compare(static, config_of("--fp16 --loss-scale 128 --hysteresis 1")) == ([], [])


@pytest.mark.parametrize(("stage", "keys", "changed"), TABLES["keys_of_the_order"])
def test_keys_that_order_the_flat_tensors_are_part_of_the_layout(
    tmp_path: Path, stage: int, keys: dict[str, object], changed: list[str]
) -> None:
    before = config_of("", {"stage": stage}, tmp_path)
    now = config_of("", {"stage": stage, **keys}, tmp_path)
    assert compare(before, now)[0] == []
    saved, other = (ParallelLayout.of(config, 1) for config in (before, now))
    changes = layout_changes(saved, other)
    assert len(changes) == len(changed)
    for name, change in zip(changed, changes, strict=True):
        assert change.startswith(f"zero_optimization.{name} ")


def test_changes_of_the_layout_are_named() -> None:
    stages = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "dualpipev"}
    before = config_of("").with_values({**stages, "num_layers": 4})
    now = before.with_values({"pipeline_schedule": "1f1b", "bf16": True})
    assert resume_conflicts(saved_by(before), now, 1) == []
    assert layout_changes(*(ParallelLayout.of(config, 1) for config in (before, now))) == [
        "precision fp32 -> bf16",
        "layers per stage 1,1,1,1 -> 2,2",
    ]


@pytest.mark.parametrize(
    ("partitions", "difference"),
    [
        (PLACES, ""),
        (PLACES[:1], "2 flat tensors in the checkpoint, 1 in this run"),
        (
            (
                dataclasses.replace(
                    PLACES[0],
                    parameters=(ParameterPlace("b", (8, 4), 0), ParameterPlace("a", (8, 8), 32)),
                ),
                PLACES[1],
            ),
            "flat tensor 0: a [8, 8] at 0 in the checkpoint, b [8, 4] at 0 in this run",
        ),
        (
            (PLACES[0], dataclasses.replace(PLACES[1], size=8)),
            "flat tensor 1: 1 parameters in 4 elements per rank in the checkpoint, 1 parameters in "
            "8 elements per rank in this run",
        ),
    ],
)
def test_another_order_of_the_flat_tensors_is_rejected(
    partitions: tuple[FlatPartition, ...], difference: str
) -> None:
    problems = partition_conflicts(saved_by(config_of("")), partitions)
    assert codes(problems) == (["resume-partitions-changed"] if difference else [])
    assert all(difference in str(problem) for problem in problems)


def test_values_of_wrong_types_are_compared_as_they_are() -> None:
    config = config_of("")
    found = saved_by(config)
    broken = {**found.run.config, "model": {**found.run.config["model"], "hidden_size": "x"}}
    found = dataclasses.replace(found, run=dataclasses.replace(found.run, config=broken))
    (problem,) = resume_conflicts(found, config, 1)
    assert problem.fields == ("hidden_size",)
