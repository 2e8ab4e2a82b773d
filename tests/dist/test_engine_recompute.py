"""Dropout in the engine: its masks follow the position in the data, and training with activation
checkpointing is bitwise equal to training without it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.dist.compare import differing_bits
from tests.dist.parity_cases import Case, reference_of, train_alone
from tests.dist.rank_jobs import JobResults, Jobs, case_training, run_jobs, selected
from tests.proofs.cases import with_proofs

LAYOUTS = list(itertools.product((1, 3), (1, 2)))
"""ZeRO stage and tensor-parallel size."""
FULL = {"recompute_granularity": "full"}
RECOMPUTE = {
    "full": [[[1, 1], [3, 2]], {"recompute_granularity": "full"}],
    "pairs of layers": [
        [[1, 2], [3, 1]],
        {"recompute_granularity": "full", "checkpoint_num_layers": 2},
    ],
    "selective": [[[1, 2], [3, 1]], {"recompute_granularity": "selective"}],
    "deepspeed": [
        [[1, 2], [3, 1]],
        {"recompute_granularity": "full", "deepspeed_activation_checkpointing": True},
    ],
    "partitioned": [
        [[1, 1], [3, 2]],
        {"recompute_granularity": "full", "partition_activations": True},
    ],
    "in host memory": [
        [[1, 2], [3, 1]],
        {
            "recompute_granularity": "full",
            "partition_activations": True,
            "checkpoint_in_cpu": True,
            "synchronize_each_layer": True,
        },
    ],
    "contiguous": [
        [[1, 2], [3, 1]],
        {
            "recompute_granularity": "full",
            "partition_activations": True,
            "contiguous_checkpointing": True,
        },
    ],
}
CASES = [(kind, *layout) for kind, (layouts, _) in RECOMPUTE.items() for layout in layouts]
"""Kind of recomputation, stage and size."""
PROOFS = [
    ("pairs of layers", 3, 1),
    ("selective", 1, 2),
    ("deepspeed", 1, 2),
    ("partitioned", 1, 1),
    ("in host memory", 3, 1),
    ("contiguous", 1, 2),
]
STORED = "stored"
TWO_STEPS = (16, 16)
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}


def case_of(stage: int, tp: int, **options: Any) -> Case:
    """Two micro-batches of each step."""
    return Case(2, stage, tp, 2, "learned", "adamw", batches=TWO_STEPS, **options)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    chosen = [tuple(params.values()) for _, params in selected(request) if "kind" in params]
    jobs = Jobs()
    for kind, stage, tp in dict.fromkeys([*((STORED, *layout) for layout in LAYOUTS), *chosen]):
        recompute = {} if kind == STORED else RECOMPUTE[kind][1]
        job = case_training(case_of(stage, tp), model=DROPOUT, recompute=recompute)
        jobs[f"{stage}-{tp}-{kind}"] = job
    return run_jobs(2, jobs)


@pytest.mark.parametrize("stage", [1, 3])
def test_masks_follow_the_position_in_the_data(stage: int, outcomes: JobResults) -> None:
    """Two data-parallel ranks with two micro-batches drop as one process with four.

    Claim (parallel): dropout masks follow the position in the data: two data-parallel ranks drop
    the same values as one process
    """
    reference = train_alone(case_of(stage, 1, changes={"model": DROPOUT}))
    assert outcomes.differences(f"{stage}-1-{STORED}", reference) == []


@pytest.mark.parametrize(("kind", "stage", "tp"), with_proofs(CASES, PROOFS))
def test_recompute_is_bitwise_equal(kind: str, stage: int, tp: int, outcomes: JobResults) -> None:
    """Claim (precision): activation checkpointing gives the same bits"""
    stored = outcomes.of(f"{stage}-{tp}-{STORED}")
    recomputed = outcomes.of(f"{stage}-{tp}-{kind}")
    without_dropout = reference_of("learned", "adamw")
    for one, other in zip(stored, recomputed, strict=True):
        assert abs(one.losses[0] - without_dropout.losses[0]) > 1e-3
        assert other.notes["attention calls"] == 2 * one.notes["attention calls"] > 0
        assert differing_bits(one, other) == []
