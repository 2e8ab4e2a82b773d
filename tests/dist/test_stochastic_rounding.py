"""Weights that are rounded stochastically, on one process and on two ranks.

Where layouts sum the same gradients in fp32, their weights are equal bit for bit. Tensor-parallel
ranks round activations at other places, so their gradients differ; that they draw the random bits
of the same elements is compared by the positions that their optimizers have.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from megatron_ds.engine.optimizers.stochasticadamw import StochasticAdamW
from megatron_ds.engine.states.flats import own_flats
from megatron_ds.parallel.sharding import shard_spec, take_shard
from tests.dist.compare import differing_names
from tests.dist.engine_harness import Meshes, build
from tests.dist.parity_cases import Case, config_of
from tests.dist.rank_jobs import JobResults, Jobs, case_training, run_by_world

PRECISION = {"bf16": True, "bf16_master_weights": True}
STOCHASTIC = {"bf16_stochastic_round": True, "clip_grad": 0.0}
"""The norm, by which gradients are clipped, is summed in another order on each layout."""
STAGES = (2, 3)


def changes() -> dict[str, Any]:
    return {"precision": PRECISION, "optimizer": STOCHASTIC}


@pytest.fixture(scope="module")
def outcomes() -> JobResults:
    alone = Jobs()
    pairs = Jobs()
    for stage in STAGES:
        # Two micro-batches of one process are those of two ranks.
        case = Case(1, stage, 1, 2, "swiglu", "adamw")
        alone[f"alone-{stage}"] = case_training(case, every_step=True, **changes())
        case = dataclasses.replace(case, world=2, accumulation=1)
        pairs[f"pair-{stage}"] = case_training(case, every_step=True, **changes())
        pairs[f"positions-{stage}"] = functools.partial(compare_positions, stage)
    nearest = changes() | {"optimizer": {"clip_grad": 0.0}}
    pairs["nearest"] = case_training(Case(2, 2, 1, 1, "swiglu", "adamw"), **nearest)
    return run_by_world({1: alone, 2: pairs})


def compare_positions(stage: int, meshes: Meshes) -> tuple[int, int]:
    """Elements of the model in the flat tensors of a tensor-parallel rank, and those of them whose
    position in the complete weight the optimizer has wrong."""
    config = config_of(Case(2, stage, 2, 1, "swiglu", "adamw"), **changes())
    mesh = meshes.of(config.parallel)
    engine = build(config, mesh)
    optimizer = engine._engine.basic_optimizer
    assert isinstance(optimizer, StochasticAdamW)
    seen = 0
    wrong = 0
    for flat in own_flats(engine._engine, stage, mesh):
        positions = torch.full((flat.master.numel(),), -1)
        for block in optimizer._blocks[flat.master]:
            rows = torch.arange(block.rows).unsqueeze(1) * block.full_step
            block.view(positions).copy_(block.full_position + rows + torch.arange(block.columns))
        for part in flat.parts:
            spec = shard_spec(part.parameter)
            shape = list(part.place.shape)
            if spec is not None:
                shape[spec.dim] = sum(spec.sections)
            full = torch.arange(math.prod(shape)).view(shape)
            shard = full if spec is None else take_shard(full, spec, mesh.tp.rank, mesh.tp.size)
            span = slice(part.elements.start, part.elements.stop)
            held = positions[part.position : part.position + len(part.elements)]
            seen += len(held)
            wrong += int((held != shard.flatten()[span]).sum())
    return seen, wrong


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_get_the_weights_of_one_process(stage: int, outcomes: JobResults) -> None:
    """Claim (precision): with stochastic rounding, two data-parallel ranks get the weights of one
    process bit for bit, at ZeRO 2 and 3"""
    (alone,) = outcomes.of("alone-2")
    runs = [*outcomes.of(f"alone-{stage}"), *outcomes.of(f"pair-{stage}")]
    for run in runs:
        assert len(run.weights) == len(alone.weights) > 3
        for weights, expected in zip(run.weights, alone.weights, strict=True):
            assert differing_names(weights, expected) == []
        assert all(torch.equal(w, w.bfloat16().float()) for w in run.weights[-1].values())
    (nearest, _) = outcomes.of("nearest")
    assert differing_names(nearest.weights[-1], alone.weights[-1]) != []


@pytest.mark.parametrize("stage", STAGES)
def test_tensor_parallel_ranks_have_the_positions_of_the_complete_weights(
    stage: int, outcomes: JobResults
) -> None:
    """Claim (precision): with stochastic rounding, tensor-parallel ranks round an element by the
    random bits that one process rounds it by"""
    for seen, wrong in outcomes.of(f"positions-{stage}"):
        assert seen > 1000
        assert wrong == 0
