"""--calculate-per-token-loss with unequal loss masks, compared with one process.

The one process takes the mean over all counted tokens of a global batch at once. Ranks and
micro-batches have different numbers of counted tokens, and a step's number of micro-batches grows.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_ds.config import Config, DataConfig
from megatron_ds.data.micro_batches import collate
from megatron_ds.engine.build import build_engine
from megatron_ds.train_state import StepPlan
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.engine_harness import CPU, prepare
from tests.dist.parity_cases import OPTIMIZERS, RATES, Case, config_of
from tests.dist.rank_jobs import Job, JobResults, run_jobs
from tests.dist.reference import EOD, Samples, train_reference
from tests.distributed import run_ranks

WORLD = 2
LAYOUTS = [
    (stage, tp, optimizer)
    for stage, tp in ((0, 1), (1, 1), (2, 1), (3, 1), (1, 2), (3, 2))
    for optimizer in OPTIMIZERS
]
BATCH_SIZES = [4, 8, 16]
SAMPLES = Samples(sum(BATCH_SIZES), parity_cases.SHAPE).with_document_ends(0.4)
MEAN_OF_MEANS = "mean of means"


def config_for(stage: int, tp: int, optimizer: str, folder: Path) -> Config:
    config = config_of(Case(WORLD, stage, tp, 4, "rope", optimizer), folder)
    return dataclasses.replace(
        config,
        data=DataConfig(eod_mask_loss=True),
        optimizer=dataclasses.replace(config.optimizer, calculate_per_token_loss=True),
    )


def plans_for(config: Config, tp: int, optimizer: str) -> list[StepPlan]:
    micro = config.schedule.micro_batch_size
    assert micro is not None
    return [
        StepPlan(
            iteration=step + 1,
            global_batch_size=size,
            num_micro_batches=size // (micro * WORLD // tp),
            lr=lr,
            weight_decay=config.optimizer.weight_decay,
            seq_length=parity_cases.SHAPE["seq_length"],
        )
        for step, (size, lr) in enumerate(zip(BATCH_SIZES, RATES[optimizer], strict=True))
    ]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    folder = tmp_path_factory.mktemp("per-token")
    jobs = []
    for stage, tp, optimizer in LAYOUTS:
        config = config_for(stage, tp, optimizer, folder)
        plans = plans_for(config, tp, optimizer)
        jobs.append(Job(f"{stage}-{tp}-{optimizer}", config, plans, SAMPLES))
    base = jobs[2]
    per_micro_batch = dataclasses.replace(base.config.optimizer, calculate_per_token_loss=False)
    config = dataclasses.replace(base.config, optimizer=per_micro_batch)
    jobs.append(dataclasses.replace(base, name=MEAN_OF_MEANS, config=config))
    return run_jobs(WORLD, jobs, folder)


@pytest.mark.parametrize(("stage", "tp", "optimizer"), LAYOUTS)
def test_per_token_loss_equals_one_process(
    stage: int, tp: int, optimizer: str, outcomes: JobResults, tmp_path: Path
) -> None:
    config = config_for(stage, tp, optimizer, tmp_path)
    reference = train_reference(config, SAMPLES, plans_for(config, tp, optimizer))
    for run in outcomes.of(f"{stage}-{tp}-{optimizer}"):
        assert differences(run, reference) == []


def test_mean_over_micro_batches_differs_with_unequal_masks(
    outcomes: JobResults, tmp_path: Path
) -> None:
    """The default averages micro-batches' means, so the comparison above can see the flag."""
    config = config_for(1, 1, "sgd", tmp_path)
    reference = train_reference(config, SAMPLES, plans_for(config, 1, "sgd"))
    for run in outcomes.of(MEAN_OF_MEANS):
        assert any(line.startswith("losses[0]") for line in differences(run, reference))


def evaluate_on_a_rank(rank: int, config: Config) -> tuple[float, float, float, float]:
    """Total and weight of two unequal micro-batches, and the same of one batch with both."""
    mesh = prepare((2,))[2]
    engine = build_engine(config, mesh, CPU)
    halves = [SAMPLES.batch(first, 2).numpy() for first in (0, 2)]
    both = SAMPLES.batch(0, 4).numpy()
    batches = [collate(rows, 0, EOD) for rows in (*halves, both)]
    return *engine.eval_loss(iter(batches[:2]), 2), *engine.eval_loss(iter(batches[2:]), 1)


def test_evaluation_weights_every_token_equally(tmp_path: Path) -> None:
    config = config_for(1, 2, "sgd", tmp_path)
    counted = float((SAMPLES.batch(0, 4)[:, :-1] != EOD).sum())
    for total, weight, total_at_once, weight_at_once in run_ranks(
        evaluate_on_a_rank, WORLD, config
    ):
        assert weight == weight_at_once == counted
        torch.testing.assert_close(total, total_at_once, rtol=1e-5, atol=0)
