"""Batch size ramp-up, and a sequence-length curriculum with a batch size schedule in tokens.

DeepSpeed's own accumulation boundary would step in the middle of a batch once the number of
micro-batches changes. Every stage equals one process that trains on the truncated samples, with the
learning rates of the schedule. Attention inside documents equals one with a dense mask.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.train_state import StepPlan
from tests.dist import parity_cases
from tests.dist.parity_cases import Case, config_of, scheduled_plans
from tests.dist.rank_jobs import JobResults, Jobs, run_jobs, selected, training
from tests.dist.reference import Run, Samples, train_reference
from tests.proofs.cases import with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)

WORLD = 2
SAMPLES = Samples(44, parity_cases.SHAPE).with_document_ends(0.2)
"""Those of either schedule."""
SGD = {"lr": 0.4, "sgd_momentum": 0.9, "weight_decay": 0.01, "clip_grad": 0.5}


@dataclass(frozen=True)
class Schedule:
    """Fields of the ScheduleConfig, and what they mean for every step."""

    fields: dict[str, Any]
    batches: list[int]
    lengths: list[int]
    rates: list[float]


RAMPUP = Schedule(
    TABLES["rampup"],
    [4, 8, 16, 16],
    [16] * 4,
    # Half of the warmup after 4 samples; then a linear decay from 0.4 that would reach 0 after 44
    # samples, 36 after the warmup.
    [0.1, 0.25, 0.4 * 32 / 36, 0.4 * 16 / 36],
)
# Tokens before each step; the warmup takes 64, the decay ends at 576.
BEFORE = [0, 16, 48, 96, 224, 352]
CURRICULUM = Schedule(
    TABLES["curriculum"],
    [4, 4, 4, 8, 8, 16],
    [4, 8, 12, 16, 16, 16],
    [0.1 + 0.3 * n / 64 if n < 64 else 0.4 * (576 - n) / 512 for n in BEFORE],
)

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
PARTITIONED = {**FULL, "partition_activations": True}
PACKED = {"reset_position_ids": True, "reset_attention_mask": True}
CASES: dict[str, tuple[Schedule, int, int, str, dict[str, Any]]] = {
    "ramp-up zero0": (RAMPUP, 0, 1, "rope", {}),
    "ramp-up zero1": (RAMPUP, 1, 1, "rope", {}),
    "ramp-up zero2": (RAMPUP, 2, 1, "rope", {}),
    "ramp-up zero3 tp2": (RAMPUP, 3, 2, "rope", {}),
    "zero0": (CURRICULUM, 0, 1, "learned", {}),
    "zero1 tp2 partitioned": (CURRICULUM, 1, 2, "alibi", {"recompute": PARTITIONED}),
    "zero2": (CURRICULUM, 2, 1, "learned", {}),
    "zero3 packed full": (CURRICULUM, 3, 1, "learned", {"recompute": FULL, "data": PACKED}),
    "zero1 tp2 packed gqa": (CURRICULUM, 1, 2, "gqa", {"recompute": SELECTIVE, "data": PACKED}),
}
"""Name -> schedule, ZeRO stage, tensor-parallel size, model, and other changed fields."""
PROOFS = ("ramp-up zero0", "ramp-up zero2", "zero1 tp2 packed gqa")
OWN_BOUNDARY = "own boundary"


@functools.cache
def config_and_plans(name: str) -> tuple[Config, list[StepPlan]]:
    """The configuration, and the plans of the training loop."""
    schedule, stage, tp, model, changes = CASES[name]
    fields = {**schedule.fields, "micro_batch_size": 2 * tp}
    case = Case(WORLD, stage, tp, 4, model, "sgd")
    config = config_of(case, optimizer=SGD, schedule=fields, **changes)
    return config, scheduled_plans(config, WORLD)


def reference_of(name: str) -> Run:
    config, plans = config_and_plans(name)
    return train_reference(config, SAMPLES, plans)


def use_deepspeed_boundary(ds_engine: Any) -> None:
    """Let DeepSpeed determine the accumulation boundary by its own counter."""
    ds_engine.set_gradient_accumulation_boundary = lambda last: None


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    names = [params["name"] for _, params in selected(request) if "name" in params]
    jobs = Jobs()
    for name in dict.fromkeys(names):
        config, plans = config_and_plans(name)
        jobs[name] = training(config, plans, SAMPLES, tensors_of={1, len(plans)})
    config, plans = config_and_plans("ramp-up zero1")
    jobs[OWN_BOUNDARY] = training(config, plans, SAMPLES, use_deepspeed_boundary)
    return run_jobs(WORLD, jobs)


@pytest.mark.parametrize("name", with_proofs(CASES, PROOFS))
def test_schedule_equals_one_process(name: str, outcomes: JobResults) -> None:
    """Claim (schedules): a sequence length curriculum with batch sizes by tokens equals one process

    Claim (schedules): a batch size ramp-up equals one process
    """
    schedule = CASES[name][0]
    config, plans = config_and_plans(name)
    assert [plan.seq_length for plan in plans] == schedule.lengths
    assert [plan.global_batch_size for plan in plans] == schedule.batches
    assert [4 * plan.num_micro_batches for plan in plans] == schedule.batches
    reference = reference_of(name)
    assert min(norm for norm in reference.norms if norm is not None) > config.optimizer.clip_grad
    assert outcomes.differences(name, reference) == []
    for run in outcomes.of(name):
        assert run.rates == pytest.approx(schedule.rates, rel=1e-12)


def test_deepspeed_own_boundary_differs(outcomes: JobResults) -> None:
    """The comparison above detects a missing boundary."""
    found = outcomes.differences(OWN_BOUNDARY, reference_of("ramp-up zero1"))
    for rank in range(WORLD):
        assert any(line.startswith(f"rank {rank}: weights[2]") for line in found), found
