"""A non-finite gradient on one rank: all ranks skip the step, and nothing changes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from megatron_ds.parallel.mesh import Mesh
from tests.dist.engine_harness import full_weights
from tests.dist.nonfinite_harness import WORLD, Training, config_for, differing_names
from tests.dist.rank_jobs import JobResults, run_jobs

LAYOUTS = [
    *((False, 0, 1), (False, 1, 2), (False, 2, 1), (False, 3, 2)),
    *((False, 0, 2), (True, 1, 1), (True, 2, 2), (True, 3, 1)),
]
"""bf16, ZeRO stage and tensor-parallel size: every pair that is supported."""


def train_with_skipped_step(
    bf16: bool, stage: int, tp: int, meshes: dict[int, Mesh]
) -> dict[str, Any]:
    """Steps with good, corrupted and good gradients, and a run that omits the corrupted step."""
    config, mesh = config_for(stage, tp, bf16=bf16), meshes[tp]
    run = Training(config, mesh, steps=3)
    first, before = run.step(), full_weights(run.engine, mesh)
    has_moments = run.has_moments()
    skipped, changed = run.corrupted_step(math.inf if stage % 2 else math.nan)
    last, end = run.step(), full_weights(run.engine, mesh)
    run.close()

    reference = Training(config, mesh, steps=3)
    reference.step()
    for _ in range(2):  # the samples of one step
        next(reference.batches)
    expected = reference.step()
    differences = differing_names(end, full_weights(reference.engine, mesh))
    reference.close()
    return {
        "skipped": [result.skipped for result in (first, skipped, last)],
        "norm": skipped.grad_norm,
        "has moments": has_moments,
        "changed by the skipped step": changed,
        "trained": differing_names(before, end),
        "differences": differences,
        "norms": (last.grad_norm, expected.grad_norm),
        "rates": (run.rates[1:], reference.rates[1:]),
        "state": run.state,
    }


@pytest.fixture(scope="module")
def outcomes() -> JobResults:
    jobs = {str(layout): partial(train_with_skipped_step, *layout) for layout in LAYOUTS}
    return run_jobs(WORLD, jobs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_step_with_nonfinite_gradient_changes_nothing(
    layout: tuple[bool, int, int], outcomes: JobResults
) -> None:
    for seen in outcomes.of(str(layout)):
        assert seen["skipped"] == [False, True, False]
        assert not math.isfinite(seen["norm"])
        assert seen["has moments"]
        assert seen["changed by the skipped step"] == []
        assert seen["trained"] != []
        assert seen["differences"] == []
        assert seen["norms"][0] == seen["norms"][1]
        # The learning rate stays for the skipped step, and the data advances.
        (skipped_rate, last_rate), (expected_rate,) = seen["rates"]
        assert skipped_rate == last_rate == expected_rate
        assert (seen["state"].applied_samples, seen["state"].consumed_samples) == (32, 48)
        assert seen["state"].skipped_iterations == 1
