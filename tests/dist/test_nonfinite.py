"""A gradient that is not finite leaves the weights as they were, at every stage, on all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ds.data.stream import MicroBatches
from megatron_ds.engine.build import build_engine
from megatron_ds.state import StepPlan
from tests.dist import cases
from tests.dist.cases import Case, completed, config_of
from tests.dist.engine_runs import prepare, whole_weights
from tests.dist.twin import Samples
from tests.distributed import run_ranks

WORLD = 2
LAYOUTS = [(0, 1), (0, 2), (1, 1), (3, 1)]
"""ZeRO stage and tensor-parallel size."""


def poisoned_step(rank: int, stage: int, tp: int, folder: Path) -> None:
    """One good step, one whose loss is infinite on the last rank, one good step."""
    config = completed(config_of(Case(WORLD, stage, tp, 1, "rope", "adamw"), folder), WORLD)
    mesh = prepare((tp,))[tp]
    micro = config.schedule.micro_batch_size
    assert micro is not None
    size = micro * mesh.dp.size
    engine = build_engine(config, mesh, torch.device("cpu"))
    batches = MicroBatches(
        Samples(3 * size, cases.SHAPE),
        consumed=0,
        micro_batch_size=micro,
        dp_rank=mesh.dp.rank,
        dp_size=mesh.dp.size,
    )
    plans = [StepPlan(number, size, 1, 0.1, 0.0) for number in (1, 2, 3)]
    assert not engine.train_step(batches, plans[0]).skipped
    before = whole_weights(engine, mesh)
    if rank == WORLD - 1 or tp > 1:
        batch = next(batches)
        poisoned = iter([batch._replace(loss_mask_BS=batch.loss_mask_BS * torch.inf)])
    else:
        poisoned = iter([next(batches)])
    result = engine.train_step(poisoned, plans[1])
    assert result.skipped
    assert result.grad_norm is not None
    assert not torch.isfinite(torch.tensor(result.grad_norm))
    after = whole_weights(engine, mesh)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not engine.train_step(batches, plans[2]).skipped
    last = whole_weights(engine, mesh)
    assert all(bool(value.isfinite().all()) for value in last.values())
    assert any(not torch.equal(after[name], last[name]) for name in after)


@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_a_step_without_a_finite_gradient_is_dropped(stage: int, tp: int, tmp_path: Path) -> None:
    run_ranks(poisoned_step, WORLD, stage, tp, tmp_path)
