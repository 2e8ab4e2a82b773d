"""What DeepSpeed's ZeRO optimizers need not do with parameters is left out, bit for bit."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron_ds.engine import build
from tests.dist.engine_harness import Meshes
from tests.dist.parity_cases import Case, ds_file
from tests.dist.rank_jobs import Job, JobResults, Jobs, case_training, run_jobs

RANKS = 2
READERS = parameter_offload, partitioned_param_coordinator
ORIGINALS = (
    *((module, "iter_params", module.iter_params) for module in READERS),
    *((m, "print_rank_0", m.print_rank_0) for m in (*READERS, partition_parameters, stage3)),
    (
        partition_parameters.Init,
        "_allgather_params_coalesced",
        partition_parameters.Init._allgather_params_coalesced,
    ),
)
"""Owner, name and value of what is replaced at stage 3, before an engine is built."""
SMALL_PARAMETERS = {"stage": 3, "stage3_param_persistence_threshold": 100}
TRAININGS = {
    "1": case_training(Case(RANKS, 1, 2, 1, "learned", "adamw"), every_step=True),
    "2": case_training(Case(RANKS, 2, 1, 2, "learned", "adamw"), every_step=True),
    "3": case_training(
        Case(RANKS, 3, 1, 2, "learned", "adamw"),
        every_step=True,
        deepspeed={"deepspeed_config": ds_file({"zero_optimization": SMALL_PARAMETERS})},
    ),
}
"""By ZeRO stage."""


def spare_nothing(*optimizer: Any) -> None:
    """In place of a function of `zero_costs`. A mock would keep the optimizer."""


def by_deepspeed(training: Job, meshes: Meshes) -> Any:
    """A training in which DeepSpeed does everything."""
    with ExitStack() as stack:
        for owner, name, value in ORIGINALS:
            stack.enter_context(mock.patch.object(owner, name, value))
        for name in ("spare_work_on_parameters", "keep_views"):
            stack.enter_context(mock.patch.object(build, name, spare_nothing))
        return training(meshes)


def spared(training: Job, meshes: Meshes) -> Any:
    """A training, the gatherings of small parameters, and the updates of views after the first
    step of the optimizer."""
    gather = dist.all_gather_into_tensor
    update = DeepSpeedZeroOptimizer._update_model_bit16_weights
    calls: Counter[str] = Counter()

    @functools.wraps(gather)
    def count_and_gather(*arguments: Any, **options: Any) -> Any:
        calls["gather"] += 1
        return gather(*arguments, **options)

    def count_and_update(self: Any, group: int) -> None:
        # While it is built, the optimizer has not yet the size of the group's partition.
        calls["update"] += len(self.partition_size) == len(self.bit16_groups)
        update(self, group)

    with (
        mock.patch.object(dist, "all_gather_into_tensor", count_and_gather),
        mock.patch.object(DeepSpeedZeroOptimizer, update.__name__, count_and_update),
    ):
        return training(meshes), calls["gather"], calls["update"]


@pytest.fixture(scope="module")
def outcomes() -> JobResults:
    jobs = Jobs()
    for stage, training in TRAININGS.items():
        jobs[f"{stage} by DeepSpeed"] = partial(by_deepspeed, training)
        jobs[f"{stage} spared"] = partial(spared, training)
    return run_jobs(RANKS, jobs)


@pytest.mark.parametrize("stage", TRAININGS)
def test_spared_work_changes_nothing(stage: str, outcomes: JobResults) -> None:
    """Claim (deepspeed): ZeRO 3 gathers small parameters in one message of gloo, ZeRO 1 and 2 make
    no views of weights that are views, and all train as DeepSpeed does, bit for bit
    """
    pairs = zip(outcomes.of(f"{stage} spared"), outcomes.of(f"{stage} by DeepSpeed"), strict=True)
    for (run, gatherings, updates), other in pairs:
        assert run.losses == other.losses
        assert run.norms == other.norms
        for weights, expected in zip(run.weights, other.weights, strict=True):
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in weights)
        assert updates == 0
        assert (gatherings > 0) == (stage == "3")
    assert len(run.weights) > 2
