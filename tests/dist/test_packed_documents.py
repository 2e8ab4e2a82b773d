"""Packed documents in every layout: two ranks train as one process with a dense mask.

`test_layouts.py` has every pair with other options. Here are those flags alone, dropout under
recomputation, and a compiled layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.dist import parity_cases
from tests.dist.compare import differing_bits
from tests.dist.parity_cases import Case, Changes, train_alone
from tests.dist.rank_jobs import JobResults, Jobs, case_training, has_proofs, run_jobs

COMPILED = "compiled"


def changes(*flags: str, granularity: str | None = None, dropout: float = 0.0) -> Changes:
    return {
        "data": dict.fromkeys(flags, True),
        "recompute": {"recompute_granularity": granularity},
        "model": {"attention_dropout": dropout, "hidden_dropout": dropout},
        "runtime": {"seed": parity_cases.SEED},
    }


POSITIONS = "reset_position_ids"
ATTENTION = "reset_attention_mask"
BOTH = changes(POSITIONS, ATTENTION)
DROPPED = Case(2, 1, 2, 2, "learned", "adamw", changes(POSITIONS, ATTENTION, dropout=0.1), ends=0.2)
CASES = {
    # First, because ZeRO-3 leaves DeepSpeed's linear layer in torch, which some torch miscompiles.
    COMPILED: Case(
        2,
        1,
        2,
        1,
        "gqa",
        "adamw",
        {**BOTH, "runtime": {"seed": parity_cases.SEED, "compile": True}},
        ends=0.2,
    ),
    "zero2 alibi": Case(2, 2, 2, 1, "alibi", "adamw", changes(ATTENTION), ends=0.2),
    "zero3 learned": Case(2, 3, 1, 2, "learned", "adamw", BOTH, ends=0.2),
    "zero3 gqa": Case(2, 3, 1, 1, "gqa", "sgd", changes(ATTENTION, granularity="full"), ends=0.2),
    "zero1 ahead": Case(
        2, 1, 2, 2, "ahead", "adamw", changes(POSITIONS, ATTENTION, granularity="full"), ends=0.2
    ),
    "zero1 rope positions": Case(2, 1, 1, 1, "rope", "sgd", changes(POSITIONS), ends=0.2),
}


def check_no_kernel(engine: Any) -> None:
    assert not engine.module.attention.kernels


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    jobs = Jobs()
    for name, case in CASES.items():
        if name != COMPILED or has_proofs(request):
            jobs[name] = case_training(case, check_no_kernel)
    for granularity in (None, "full"):
        recompute = {"recompute_granularity": granularity}
        job = case_training(DROPPED, check_no_kernel, recompute=recompute)
        jobs[f"dropout {granularity}"] = job
    return run_jobs(2, jobs)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.proof] * (n == COMPILED)) for n in CASES]
)
def test_layout_equals_one_process_with_a_dense_mask(name: str, outcomes: JobResults) -> None:
    """Claim (samples): and so it has in every layout, compiled and with activation checkpointing"""
    assert outcomes.differences(name, train_alone(CASES[name])) == []
    for run in outcomes.of(name):
        # Each layer is compiled in two parts, before and after its attention, once for all
        # micro-batches, whatever their document lengths.
        assert (run.notes["compiled"] > 0) == (name == COMPILED)
        assert run.notes["compiled"] <= 6 * parity_cases.SHAPE["num_layers"]


def test_recomputation_drops_what_was_dropped(outcomes: JobResults) -> None:
    stored = outcomes.of("dropout None")
    recomputed = outcomes.of("dropout full")
    for run, other in zip(recomputed, stored, strict=True):
        assert differing_bits(run, other) == []


def test_bounds_change_what_is_learned() -> None:
    case = CASES["zero3 learned"]
    unbound = train_alone(dataclasses.replace(case, changes={}))
    assert unbound.losses[0] != pytest.approx(train_alone(case).losses[0], rel=1e-4)
