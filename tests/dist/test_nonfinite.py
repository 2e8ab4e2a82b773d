"""A non-finite gradient on one rank: all ranks skip the step, and nothing changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import PrecisionConfig
from megatron_ds.parallel.mesh import Mesh
from tests.dist.engine_harness import full_weights
from tests.dist.nonfinite_harness import (
    Layout,
    Training,
    corrupt_gradient,
    differing_names,
    run_layouts,
)

LAYOUTS = [
    Layout(PrecisionConfig(bf16=bf16), stage, tp)
    for bf16 in (False, True)
    for stage in (0, 1, 2, 3)
    for tp in (1, 2)
    if stage > 0 or not bf16
]


def train_with_skipped_step(
    layout: Layout, meshes: dict[int, Mesh], folder: Path
) -> dict[str, Any]:
    """Steps with good, corrupted and good gradients, and a run that omits the corrupted step."""
    config, mesh = layout.config(folder), meshes[layout.tp]
    run = Training(config, mesh, steps=3)
    first = run.step()
    before = run.state_tensors()
    with corrupt_gradient(run.engine, math.inf if layout.stage % 2 else math.nan):
        skipped = run.step()
    changed = differing_names(before, run.state_tensors())
    last = run.step()
    end = full_weights(run.engine, mesh)
    state, rates = run.state, run.rates
    run.close()

    reference = Training(config, mesh, steps=3)
    reference.step()
    reference.skip_samples()
    expected = reference.step()
    differences = differing_names(end, full_weights(reference.engine, mesh))
    expected_rates = reference.rates
    reference.close()
    return {
        "skipped": [result.skipped for result in (first, skipped, last)],
        "norm": skipped.grad_norm,
        "moments": [name for name in before if name.startswith("exp_avg_sq")],
        "changed by the skipped step": changed,
        "trained": [name for name in differing_names(before, {**before, **end}) if name in end],
        "differences": differences,
        "norms": (last.grad_norm, expected.grad_norm),
        "rates": (rates[1:], expected_rates[1:]),
        "state": state,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_layouts(train_with_skipped_step, LAYOUTS, tmp_path_factory.mktemp("nonfinite"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_step_with_nonfinite_gradient_changes_nothing(
    layout: Layout, outcomes: dict[str, list[Any]]
) -> None:
    for seen in outcomes[layout.name]:
        assert isinstance(seen, dict), seen
        assert seen["skipped"] == [False, True, False]
        assert not math.isfinite(seen["norm"])
        assert seen["moments"] != []
        assert seen["changed by the skipped step"] == []
        assert seen["trained"] != []
        assert seen["differences"] == []
        assert seen["norms"][0] == seen["norms"][1]
        # The learning rate stays for the skipped step, and the data advances.
        (skipped_rate, last_rate), (expected_rate,) = seen["rates"]
        assert skipped_rate == last_rate == expected_rate
        assert (seen["state"].applied_samples, seen["state"].consumed_samples) == (32, 48)
        assert seen["state"].skipped_iterations == 1
