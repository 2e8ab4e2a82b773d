"""--calculate-per-token-loss with unequal loss masks, compared with one process.

The one process takes the mean over all counted tokens of a global batch at once. Ranks and
micro-batches have different numbers of counted tokens, and a step's number of micro-batches grows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_ds.config import Config
from megatron_ds.data.micro_batches import Batch
from megatron_ds.train_state import StepPlan
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.engine_harness import build, prepare
from tests.dist.parity_cases import Case, config_of, plans_of
from tests.dist.rank_jobs import JobResults, run_jobs, training
from tests.dist.reference import EOD, Run, Samples, train_reference
from tests.distributed import run_ranks

WORLD = 2
CASES = [
    Case(WORLD, stage, tp, 4, "rope", optimizer)
    for stage, tp, optimizer in (
        *((0, 1, "adamw"), (1, 1, "sgd"), (2, 1, "adamw"), (3, 1, "sgd")),
        *((1, 2, "adamw"), (2, 2, "sgd"), (3, 2, "adamw")),
    )
]
"""Every pair of a stage from 1 on, a tensor-parallel size and an optimizer."""
BATCH_SIZES = [4, 8, 16]
SAMPLES = Samples(sum(BATCH_SIZES), parity_cases.SHAPE).with_document_ends(0.4)
MEAN_OF_MEANS = "mean of means"


def config_for(case: Case, per_token: bool = True) -> Config:
    return config_of(
        case, data={"eod_mask_loss": True}, optimizer={"calculate_per_token_loss": per_token}
    )


def plans_for(case: Case) -> list[StepPlan]:
    samples_per_micro_step = case.micro_batch_size * WORLD // case.tp
    return [
        dataclasses.replace(
            plan, global_batch_size=size, num_micro_batches=size // samples_per_micro_step
        )
        for plan, size in zip(plans_of(case), BATCH_SIZES, strict=True)
    ]


def reference_of(case: Case) -> Run:
    return train_reference(config_for(case), SAMPLES, plans_for(case))


@pytest.fixture(scope="module")
def outcomes() -> JobResults:
    jobs = {case.name: training(config_for(case), plans_for(case), SAMPLES) for case in CASES}
    jobs[MEAN_OF_MEANS] = training(config_for(CASES[1], False), plans_for(CASES[1]), SAMPLES)
    return run_jobs(WORLD, jobs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_per_token_loss_equals_one_process(case: Case, outcomes: JobResults) -> None:
    for run in outcomes.of(case.name):
        assert differences(run, reference_of(case)) == []


def test_mean_over_micro_batches_differs_with_unequal_masks(outcomes: JobResults) -> None:
    """The default averages micro-batches' means, so the comparison above can see the flag."""
    for run in outcomes.of(MEAN_OF_MEANS):
        found = differences(run, reference_of(CASES[1]))
        assert any(line.startswith("losses[0]") for line in found)


def evaluate_on_a_rank(rank: int, config: Config) -> tuple[float, float, float, float]:
    """Total and weight of two unequal micro-batches, and the same of one batch with both."""
    engine = build(config, prepare()[2])
    rows = [SAMPLES.batch(first, count).int().numpy() for first, count in ((0, 2), (2, 2), (0, 4))]
    batches = engine.device_batches(Batch(row, row.shape, 0, EOD) for row in rows)
    parts = [engine.eval_loss(batches, count) for count in (2, 1)]
    return tuple(float(value) for part in parts for value in part)  # type: ignore[return-value]


def test_evaluation_weights_every_token_equally() -> None:
    config = config_for(Case(WORLD, 1, 2, 4, "rope", "sgd"))
    counted = float((SAMPLES.batch(0, 4)[:, :-1] != EOD).sum())
    for total, weight, total_at_once, weight_at_once in run_ranks(
        evaluate_on_a_rank, WORLD, config
    ):
        assert weight == weight_at_once == counted
        torch.testing.assert_close(total, total_at_once, rtol=1e-5, atol=0)
