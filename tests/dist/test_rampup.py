"""Batch size ramp-up: 4, 8, 16 samples in 1, 2, 4 micro-batches per rank.

DeepSpeed's own accumulation boundary would step in the middle of a batch once the number of
micro-batches changes. Every stage equals one process, with the schedule's learning rates.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedules
from megatron_ds.config import Config, OptimizerConfig, ScheduleConfig
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, complete_config, config_of
from tests.dist.rank_jobs import Job, JobResults, run_jobs
from tests.dist.reference import Samples, train_reference

WORLD = 2
LAYOUTS = [(0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (3, 2)]
"""ZeRO stage and tensor-parallel size."""
BATCHES = [4, 8, 16, 16]
# Half of the warmup after 4 samples; then a linear decay from 0.4 that would reach 0 after 44
# samples, 36 after the warmup.
RATES = [0.1, 0.25, 0.4 * 32 / 36, 0.4 * 16 / 36]
SAMPLES = Samples(sum(BATCHES), parity_cases.SHAPE)
OWN_BOUNDARY = "own boundary"


def rampup_config(stage: int, tp: int, folder: Path) -> Config:
    config = config_of(Case(WORLD, stage, tp, 4, "rope", "sgd"), folder)
    config = dataclasses.replace(
        config,
        optimizer=OptimizerConfig(
            optimizer="sgd", lr=0.4, sgd_momentum=0.9, weight_decay=0.01, clip_grad=0.5
        ),
        schedule=ScheduleConfig(
            micro_batch_size=2 * tp,
            global_batch_size=16,
            rampup_batch_size=(4, 4, 12),
            train_samples=sum(BATCHES),
            lr_decay_style="linear",
            lr_warmup_init=0.1,
            lr_warmup_samples=8,
        ),
    )
    return complete_config(config, WORLD)


def plans_of(config: Config) -> list[StepPlan]:
    """The plans of the training loop."""
    dp_size = config.parallel.data_parallel_size(WORLD)
    state, plans = TrainState(), []
    while state.iteration < schedules.total_iterations(config, dp_size):
        plans.append(schedules.plan(config, state, dp_size))
        state = state.advance(plans[-1], StepResult(0.0, 0.0))
    return plans


def use_deepspeed_boundary(ds_engine: Any) -> None:
    """Let DeepSpeed determine the accumulation boundary by its own counter."""
    ds_engine.set_gradient_accumulation_boundary = lambda last: None


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    folder = tmp_path_factory.mktemp("rampup")
    jobs = []
    for stage, tp in LAYOUTS:
        config = rampup_config(stage, tp, folder)
        jobs.append(Job(f"{stage}-{tp}", config, plans_of(config), SAMPLES))
    jobs.append(dataclasses.replace(jobs[1], name=OWN_BOUNDARY, probe=use_deepspeed_boundary))
    return run_jobs(WORLD, jobs, folder)


@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_rampup_equals_one_process(
    stage: int, tp: int, outcomes: JobResults, tmp_path: Path
) -> None:
    config = rampup_config(stage, tp, tmp_path)
    plans = plans_of(config)
    assert [plan.global_batch_size for plan in plans] == BATCHES
    assert [plan.num_micro_batches for plan in plans] == [1, 2, 4, 4]
    reference = train_reference(config, SAMPLES, plans)
    assert min(norm for norm in reference.norms if norm is not None) > config.optimizer.clip_grad
    for run in outcomes.of(f"{stage}-{tp}"):
        assert run.rates == pytest.approx(RATES, rel=1e-12)
        assert differences(run, reference) == []


def test_deepspeed_own_boundary_differs(outcomes: JobResults, tmp_path: Path) -> None:
    """The comparison above detects a missing boundary."""
    config = rampup_config(1, 1, tmp_path)
    reference = train_reference(config, SAMPLES, plans_of(config))
    for run in outcomes.of(OWN_BOUNDARY):
        found = differences(run, reference)
        assert any(line.startswith("weights[2]") for line in found), found
