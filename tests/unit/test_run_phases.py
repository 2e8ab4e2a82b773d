"""Stages: how they are read, what they resolve to, their schedules, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.compatibility import changed_settings, resume_conflicts
from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config, yaml_file
from megatron_ds.config.problems import Problem
from megatron_ds.loading.options_from_checkpoint import with_saved_options
from megatron_ds.planning.hardware import HARDWARE
from megatron_ds.planning.plan_report import StagePlans
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from tests.problems import codes
from tests.tables import tables
from tests.unit.checkpoint.test_resume import saved_by

TABLES = tables(__file__, tuple)

BASE = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--lr 1 --min-lr 0.1 --data-path x --tokenizer-type NullTokenizer "
    "--vocab-size 9 --position-embedding-type rope "
)
STAGES = """
stages:
- {name: stable, train-iters: 4, lr-warmup-iters: 2, lr-decay-style: constant}
- name: mid
  train-tokens: 0.16K
  lr-decay-style: linear
  train-data-path: [0.3, a, 0.7, b]
  seq-length: 16
  global-batch-size: 4
  rotary-base: 5e5
  weight-decay: 0.5
- {train-samples: 9, lr: 0.5, min-lr: 0.25, lr-decay-style: cosine, seq-length: 4}
"""


def built(line: str) -> tuple[Config, list[Problem]]:
    return build_config(shlex.split(line), world_size=1, warn=lambda warning: None)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run with a stage of 4 steps, one of 3 and one of 4."""
    path = tmp_path_factory.mktemp("stages") / "run.yaml"
    path.write_text(STAGES)
    result, problems = built(f"{BASE} --config {path}")
    assert problems == []
    return result


def all_steps(config: Config, state: TrainState, skipped: int = 0) -> Iterator[StepPlan]:
    """The plans of the steps after `state`; the step of one iteration is skipped."""
    phases = RunPhases(config, 1)
    last = RunPhases(config, 1).total_iterations(state)
    while state.iteration < last:
        state = phases.entered(state)
        plan = phases.plan(state)
        yield plan
        state = state.advance(plan, StepResult(1.0, 1.0, skipped=plan.iteration == skipped))
        state = TrainState.from_dict(json.loads(json.dumps(state.to_dict())))


def test_stages_have_schedules_of_their_own(config: Config) -> None:
    plans = list(all_steps(config, TrainState()))
    assert [plan.iteration for plan in plans] == list(range(1, 12))
    cosine = [0.25 + 0.125 * (1 + math.cos(math.pi * samples / 9)) for samples in (0, 2, 4, 6)]
    rates = [0.0, 0.5, 1.0, 1.0, 1.0, 0.64, 0.28, *cosine]
    assert [plan.lr for plan in plans] == pytest.approx(rates)
    for name, values in {
        "seq_length": [8] * 4 + [16] * 3 + [4] * 4,
        "global_batch_size": [2] * 4 + [4] * 3 + [2] * 4,
        "weight_decay": [0.01] * 4 + [0.5] * 3 + [0.01] * 4,
    }.items():
        assert [getattr(plan, name) for plan in plans] == values


def test_a_skipped_step_moves_the_rate_of_its_own_stage_only(config: Config) -> None:
    plans, skipping = (list(all_steps(config, TrainState(), skipped)) for skipped in (0, 2))
    assert [plan.lr for plan in skipping[:4]] == [0.0, 0.5, 0.5, 1.0]
    assert skipping[4:] == plans[4:]


def test_totals_and_samples_are_those_of_all_stages(config: Config) -> None:
    phases = RunPhases(config, 1)
    assert [tuple(end) for end in phases.totals()] == [(4, 8, 64), (7, 20, 256), (11, 28, 288)]
    starts = list(phases.starts(TrainState()))
    assert [phases.planned_samples(start)[0] for start in starts] == [8, 20, 28]
    (inside,) = (start for start in starts if start.stage == 1)
    assert phases.tokens_left(inside) == 288 - 64
    assert [name for name, _ in phases.describe(inside)] == ["mid", "3"]
    assert phases.totals(inside) == phases.totals()[1:]
    counts = {"iteration": 7, "consumed_samples": 20, "consumed_tokens": 256}
    assert phases.entered(dataclasses.replace(inside, **counts)).stage == 2


def test_a_stage_replaces_settings_of_the_run(config: Config, tmp_path: Path) -> None:
    stable, mid, last = config.phase_configs
    assert (stable.data.data_path, stable.data.train_data_path) == (("x",), None)
    assert (mid.data.data_path, mid.data.train_data_path) == (None, ("0.3", "a", "0.7", "b"))
    assert [stage.model.rotary_base for stage in config.phase_configs] == [1e4, 5e5, 1e4]
    assert "rotary_base" in mid.given - stable.given
    assert last.schedule.train_samples == 9
    plain = built(f"{BASE} --train-iters 3")[0]
    assert plain.phase_configs == (plain,)

    path = tmp_path / "again.yaml"
    path.write_text(yaml_file.dump(config))
    assert built(f"--config {path}")[0].schedule == config.schedule
    entries = " ".join(f"'{json.dumps(entry)}'" for entry in ({"name": "a", "train-iters": 2},))
    assert built(f"{BASE} --stages {entries}")[0].schedule.stages == (
        '{"name": "a", "train_iters": 2}',
    )


@pytest.mark.parametrize(("line", "expected"), TABLES["problems"])
def test_problems_of_stages_are_reported_at_once(line: str, expected: dict[str, Any]) -> None:
    problems = built(BASE + line)[1]
    assert expected.keys() <= set(codes(problems)), codes(problems)
    for problem in problems:
        assert expected.get(problem.code) in (None, problem.fields) or "adam" in str(problem)
    named = [problem for problem in problems if problem.code == "batch-size-not-divisible"]
    assert all("stage b: " in problem for problem in named)


def in_phase(config: Config, stage: int, **changes: Any) -> Any:
    """A checkpoint of a run, saved in a stage."""
    recorded = config.in_phase(stage).with_values({"stages": config.schedule.stages, **changes})
    found = saved_by(recorded)
    state = dataclasses.replace(found.run.state, stage=stage)
    return dataclasses.replace(found, run=dataclasses.replace(found.run, state=state))


def test_a_resume_compares_the_stage_of_the_checkpoint(config: Config) -> None:
    first, mid, last = config.schedule.stages
    saved = in_phase(config, 1)
    later = config.with_values({"stages": (first, mid, last.replace("9", "11"), '{"name": "4"}')})
    for now in (config, later, config.with_values({"stages": (first, mid)})):
        assert resume_conflicts(saved, now, 1) == []
        assert changed_settings(saved, now, 1) == []
    other = config.with_values({"stages": (first, mid.replace("500000.0", "7.0"), last)})
    assert codes(resume_conflicts(saved, other, 1)) == ["resume-rope-changed"]
    for stages in ((first,), (mid, first)):
        renamed = config.with_values({"stages": stages})
        assert codes(resume_conflicts(saved, renamed, 1)) == ["resume-stages-changed"]
    without = config.with_values({"stages": (), "train_iters": 20, "seq_length": 16})
    assert codes(resume_conflicts(saved, without, 1)) == ["resume-rope-changed"]

    # What some stage sets is not the checkpoint's.
    given = config.given - {"num_layers", "hidden_size", "num_attention_heads", "seq_length"}
    taken = with_saved_options(dataclasses.replace(config, given=given), saved, lambda _: None)
    assert taken.model == config.model


def test_a_plan_has_the_time_and_memory_of_each_stage(config: Config) -> None:
    stages = StagePlans.of(config.with_vocab(9), 1, HARDWARE["h100"])
    values = stages.values()
    assert [item["name"] for item in values] == ["stable", "mid", "3"]
    assert [item["tokens"] for item in values] == [64, 192, 32]
    assert stages.largest is stages.plans[1]
    assert stages.planned_tokens(1) == 192
    assert values[1]["days"] == pytest.approx(3 * stages.largest.seconds / 86400)
    assert all(f"  {item['name']} " in stages.text() for item in values)


def test_a_resume_within_a_stage_changes_no_totals(config: Config) -> None:
    """The samples and tokens of the stage before the resume count once."""
    phases = RunPhases(config, 1)
    state = TrainState()
    every = phases.totals()
    while state.iteration < phases.total_iterations():
        state = phases.entered(state)
        assert phases.totals(state) == every[state.stage :]
        assert phases.total_iterations(state) == every[-1].iterations
        assert phases.planned_samples(state)[0] == every[state.stage].samples
        assert phases.tokens_left(state) == every[-1].tokens - state.consumed_tokens
        state = state.advance(phases.plan(state), StepResult(1.0, 1.0))
    assert tuple(every[-1]) == (state.iteration, state.consumed_samples, state.consumed_tokens)
