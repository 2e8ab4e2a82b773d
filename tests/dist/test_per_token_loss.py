"""--calculate-per-token-loss with unequal loss masks, compared with one process.

The one process takes the mean over all counted tokens of a global batch at once. Ranks and
micro-batches have different numbers of counted tokens, and a step's number of micro-batches grows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ds.config import Config
from megatron_ds.data.micro_batches import Batch
from megatron_ds.data.sample import DocumentEnds
from megatron_ds.data.token_dataset import SampleReading, TransformedDataset
from tests.dist.compare import differences
from tests.dist.engine_harness import build, prepare
from tests.dist.parity_cases import Case, config_of, samples_of, train_alone
from tests.dist.rank_jobs import JobResults, Jobs, case_training, run_jobs, selected
from tests.dist.reference import EOD
from tests.distributed import run_ranks
from tests.proofs.cases import with_proofs

WORLD = 2
MASKED = {"data": {"eod_mask_loss": True}}
PER_TOKEN = {**MASKED, "optimizer": {"calculate_per_token_loss": True}}
MORE: dict[str, Any] = {"batches": (4, 8, 16), "ends": 0.4}
CASES = [
    Case(WORLD, 0, 1, 4, "rope", "adamw", PER_TOKEN, **MORE),
    Case(WORLD, 1, 1, 4, "rope", "sgd", PER_TOKEN, **MORE),
    Case(WORLD, 2, 1, 4, "ahead", "adamw", PER_TOKEN, **MORE),
    Case(WORLD, 3, 2, 4, "sinks", "sgd", PER_TOKEN, **MORE),
]
MEAN_OF_MEANS = "mean of means"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    cases = [params["case"] for _, params in selected(request) if "case" in params]
    jobs = Jobs((case.name, case_training(case)) for case in dict.fromkeys(cases))
    jobs[MEAN_OF_MEANS] = case_training(replace(CASES[1], changes=MASKED))
    return run_jobs(WORLD, jobs)


@pytest.mark.parametrize("case", with_proofs(CASES, CASES[::2]), ids=lambda case: case.name)
def test_per_token_loss_equals_one_process(case: Case, outcomes: JobResults) -> None:
    assert outcomes.differences(case.name, train_alone(case)) == []


def test_mean_over_micro_batches_differs_with_unequal_masks(outcomes: JobResults) -> None:
    """The default averages micro-batches' means, so the comparison above can see the flag."""
    for run in outcomes.of(MEAN_OF_MEANS):
        found = differences(run, train_alone(CASES[1]))
        assert any(line.startswith("losses[0]") for line in found)


def evaluate_on_a_rank(rank: int, config: Config) -> tuple[float, float, float, float]:
    """Total and weight of two unequal micro-batches, and the same of one batch with both. Both are
    exact sums over the counted tokens, and so are the nats of unweighted losses."""
    engine = build(config, prepare()[2])
    ends = DocumentEnds(EOD, masks_loss=True)
    data = TransformedDataset(samples_of(CASES[0]), [ends])
    positions = (range(2), range(2, 4), range(4))
    read = [SampleReading(data, chosen).finish() for chosen in positions]
    batches = engine.device_batches(
        Batch(samples, samples.ids.shape, 0, data.marks) for samples in read
    )
    parts = [engine.eval_loss(batches, count) for count in (2, 1)]
    assert all(part.nats == part.total for part in parts)
    return tuple(float(value) for part in parts for value in part[:2])  # type: ignore[return-value]


def test_evaluation_weights_every_token_equally() -> None:
    config = config_of(Case(WORLD, 1, 2, 4, "rope", "sgd", PER_TOKEN))
    counted = float((samples_of(CASES[0]).batch(0, 4)[:, :-1] != EOD).sum())
    for total, weight, total_at_once, weight_at_once in run_ranks(
        evaluate_on_a_rank, WORLD, config
    ):
        assert weight == weight_at_once == counted
        torch.testing.assert_close(total, total_at_once, rtol=1e-5, atol=0)
