"""Gradients of ZeRO's optimizers are summed with fewer copies and messages than by DeepSpeed."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from megatron_ds.engine import build
from megatron_ds.engine.deepspeed.gradient_sums import exchange_slices_by_gloo
from tests.dist.engine_harness import Meshes
from tests.dist.parity_cases import Case
from tests.dist.rank_jobs import Job, JobResults, Jobs, case_training, run_jobs

STAGES = (1, 2)
RANKS = 2
SIZES = (7, 64, 33)


def one_replica(stage: int) -> Job:
    """A training of experts on two tensor-parallel ranks, in two micro-batches."""
    experts = {"moe": {"num_experts": (4,), "moe_router_topk": 2}}
    return case_training(Case(RANKS, stage, 2, 2, "gqa", "adamw", experts), every_step=True)


def keep_copies(optimizer: Any, module: Any, device: torch.device) -> None:
    """In place of `leave_gradients_in_place`. A mock would keep the optimizer."""


def by_deepspeed(training: Job, meshes: Meshes) -> Any:
    """A training with DeepSpeed's copies and sums."""
    with mock.patch.object(build, "leave_gradients_in_place", keep_copies):
        return training(meshes)


def in_place(training: Job, meshes: Meshes) -> Any:
    """A training that sends no bucket of gradients with elements, and copies none of experts."""
    average = DeepSpeedZeroOptimizer.average_tensor
    flatten = DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned
    take_step = DeepSpeedZeroOptimizer.step
    started: list[bool] = []

    def expect_none(self: Any, bucket: torch.Tensor, *arguments: Any) -> Any:
        assert bucket.numel() == 0
        return average(self, bucket, *arguments)

    def expect_no_experts(self: Any, gradients: Any, *arguments: Any, **options: Any) -> Any:
        assert all(gradient.dim() < 3 for gradient in gradients) or not started
        return flatten(self, gradients, *arguments, **options)

    def step(self: Any, *arguments: Any) -> Any:
        started.append(True)  # weights are flattened before
        return take_step(self, *arguments)

    with (
        mock.patch.object(DeepSpeedZeroOptimizer, "average_tensor", expect_none),
        mock.patch.object(
            DeepSpeedZeroOptimizer, "flatten_dense_tensors_aligned", expect_no_experts
        ),
        mock.patch.object(DeepSpeedZeroOptimizer, "step", step),
    ):
        results = training(meshes)
    assert started
    return results


def slices(meshes: Meshes) -> list[torch.Tensor]:
    """This rank's slices of means, of gradients that each rank draws from its number."""
    del meshes
    exchange_slices_by_gloo()
    exchange = mock.Mock(wraps=dist.all_to_all_single)
    with mock.patch.object(dist, "all_to_all_single", exchange):
        parts = [part.clone() for part in reduce_scatter_coalesced(gradients(dist.get_rank()))]
    assert exchange.call_count == 1
    return parts


def gradients(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


@pytest.fixture(scope="module")
def outcomes() -> JobResults:
    jobs = Jobs([("slices", slices)])
    for stage in STAGES:
        training = one_replica(stage)
        jobs[f"{stage} in place"] = partial(in_place, training)
        jobs[f"{stage} by DeepSpeed"] = partial(by_deepspeed, training)
    return run_jobs(RANKS, jobs)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_one_replica_stay_in_place(stage: int, outcomes: JobResults) -> None:
    """Claim (deepspeed): ZeRO 1 and 2 with one replica neither copy its gradients to buckets nor
    reduce them, on a CPU do not flatten those of experts in fp32, and train as DeepSpeed does, bit
    for bit
    """
    pairs = zip(outcomes.of(f"{stage} in place"), outcomes.of(f"{stage} by DeepSpeed"), strict=True)
    for run, other in pairs:
        assert run.losses == other.losses
        assert run.norms == other.norms
        for weights, expected in zip(run.weights, other.weights, strict=True):
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in weights)
    assert len(run.weights) > 2


def test_gloo_sends_each_rank_its_slice_of_the_sums(outcomes: JobResults) -> None:
    """Claim (deepspeed): ZeRO 3 averages gradients with gloo without an all-reduce"""
    means = [sum(parts) for parts in zip(*map(halves, range(RANKS)), strict=True)]
    for rank, parts in enumerate(outcomes.of("slices")):
        for part, mean in zip(parts, means, strict=True):
            expected = mean.chunk(RANKS)[rank]
            assert torch.equal(part, expected)


def halves(rank: int) -> list[torch.Tensor]:
    return [gradient / RANKS for gradient in gradients(rank)]
