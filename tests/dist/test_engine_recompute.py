"""Activation checkpointing with dropout is bitwise equal to training without it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from megatron_ds.config import Config, RecomputeConfig
from tests.dist import parity_cases
from tests.dist.parity_cases import Case, config_of, plans_of
from tests.dist.rank_jobs import Job, JobResults, run_jobs
from tests.dist.reference import Samples, train_reference

LAYOUTS = list(itertools.product((1, 3), (1, 2)))
"""ZeRO stage and tensor-parallel size."""
RECOMPUTE = {
    "full": RecomputeConfig(recompute_granularity="full"),
    "pairs of layers": RecomputeConfig(recompute_granularity="full", checkpoint_num_layers=2),
    "selective": RecomputeConfig(recompute_granularity="selective"),
    "deepspeed": RecomputeConfig(
        recompute_granularity="full", deepspeed_activation_checkpointing=True
    ),
    "partitioned": RecomputeConfig(recompute_granularity="full", partition_activations=True),
}
STORED = "stored"
SAMPLES = Samples(parity_cases.STEPS * parity_cases.SAMPLES_PER_STEP, parity_cases.SHAPE)


def layout(stage: int, tp: int) -> Case:
    return Case(2, stage, tp, 4, "learned", "adamw")


def with_dropout(stage: int, tp: int, recompute: RecomputeConfig, folder: Path) -> Config:
    config = config_of(layout(stage, tp), folder)
    model = dataclasses.replace(config.model, attention_dropout=0.2, hidden_dropout=0.2)
    return dataclasses.replace(config, model=model, recompute=recompute)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    folder = tmp_path_factory.mktemp("recompute")
    jobs = []
    for stage, tp in LAYOUTS:
        for kind, recompute in {STORED: RecomputeConfig(), **RECOMPUTE}.items():
            config = with_dropout(stage, tp, recompute, folder)
            jobs.append(Job(f"{stage}-{tp}-{kind}", config, plans_of(layout(stage, tp)), SAMPLES))
    return run_jobs(2, jobs, folder)


@pytest.mark.parametrize("kind", RECOMPUTE)
@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_recompute_is_bitwise_equal(stage: int, tp: int, kind: str, outcomes: JobResults) -> None:
    stored, recomputed = outcomes.of(f"{stage}-{tp}-{STORED}"), outcomes.of(f"{stage}-{tp}-{kind}")
    for one, other in zip(stored, recomputed, strict=True):
        assert other.notes["attention calls"] == 2 * one.notes["attention calls"] > 0
        assert other.losses == one.losses
        assert other.norms == one.norms
        for kind in ("gradients", "weights"):
            for before, after in zip(getattr(one, kind), getattr(other, kind), strict=True):
                assert [n for n in before if not torch.equal(before[n], after[n])] == []


@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_dropout_is_active(stage: int, tp: int, outcomes: JobResults, tmp_path: Path) -> None:
    case = layout(stage, tp)
    without = train_reference(config_of(case, tmp_path), SAMPLES, plans_of(case))
    for run in outcomes.of(f"{stage}-{tp}-{STORED}"):
        assert abs(run.losses[0] - without.losses[0]) > 1e-3
