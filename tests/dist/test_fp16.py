"""fp16 on two ranks: agreement with fp32, and the loss scale on all ranks."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest

from megatron_ds.parallel.mesh import Mesh
from tests.dist.nonfinite_harness import RATES, WORLD, Training
from tests.dist.parity_cases import OPTIMIZERS, Case, config_of, reference_of
from tests.dist.rank_jobs import JobResults, Jobs, case_training, run_jobs

FP16 = {"fp16": True, "allow_fp16_on_cpu": True}
STEPS = 14
OVERFLOWS = (1, 2, 3, 8, 9, 13)
"""Steps in which one rank's gradient is corrupted. No other step overflows: at the highest scale
reached, 2^12, gradients of up to 16 are representable."""
FIRST_SCALE = 2.0**10
WINDOW = 2
LAYOUTS = [(1, 2), (2, 1), (3, 2)]
"""ZeRO stage and tensor-parallel size; `test_layouts.py` has all pairs."""
OPTIMIZER_OF = {1: "adamw", 2: "muon", 3: "soap"}
"""Of the stages, in the runs with overflows."""


def case_of(stage: int, tp: int, optimizer: str = "adamw") -> Case:
    """Two micro-batches per step."""
    return Case(WORLD, stage, tp, 2, "learned", optimizer)


def hysteresis_of(stage: int) -> int:
    return 1 + stage % 2


def train_with_overflows(stage: int, tp: int, meshes: dict[int, Mesh]) -> dict[str, Any]:
    """A run with a dynamic scale and corrupted gradients on one rank."""
    scale = {"initial_loss_scale": FIRST_SCALE, "loss_scale_window": WINDOW}
    precision = {**FP16, **scale, "hysteresis": hysteresis_of(stage)}
    case = case_of(stage, tp, OPTIMIZER_OF[stage])
    config = config_of(case, precision=precision, schedule=RATES)
    run = Training(config, meshes[tp], STEPS)
    results = []
    changed = []
    applied = []
    for step in range(1, STEPS + 1):
        if step in OVERFLOWS:
            result, names = run.corrupted_step(math.inf)
            changed += names
        else:
            result = run.step()
        results.append(result)
        applied.append(run.state.applied_iterations)
    has_moments = run.has_moments()
    run.close()
    return {
        "skipped": [result.skipped for result in results],
        "scales": [result.loss_scale for result in results],
        "norms": [float(result.grad_norm) for result in results],
        "changed": changed,
        "has moments": has_moments,
        "applied": applied,
        "rates": run.rates,
    }


@pytest.fixture(scope="module")
def outcomes() -> JobResults:
    jobs = Jobs()
    for layout in LAYOUTS:
        jobs[f"dynamic {layout}"] = partial(train_with_overflows, *layout)
        static = {**FP16, "loss_scale": 512.0}
        jobs[f"static {layout}"] = case_training(case_of(*layout), precision=static)
    return run_jobs(WORLD, jobs)


def expected_scales(skipped: list[bool], hysteresis: int) -> list[float]:
    """Scales by DeepSpeed's rule.

    An overflow halves the scale once the hysteresis is used up. The scale doubles with every
    WINDOW-th good step after the first good one, which also restores the hysteresis.
    """
    scale = FIRST_SCALE
    hysteresis_left = hysteresis
    good = 0
    scales = []
    for step, overflow in enumerate(skipped):
        if overflow:
            good = 0
            if hysteresis_left == 1:
                scale /= 2
            else:
                hysteresis_left -= 1
        else:
            good += 1
            since = good - 1 if any(skipped[:step]) else good
            if since > 0 and since % WINDOW == 0:
                scale = scale * 2
                hysteresis_left = hysteresis
        scales.append(scale)
    return scales


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_scale_follows_flags_on_all_ranks(
    layout: tuple[int, int], outcomes: JobResults
) -> None:
    """Claim (precision): the dynamic loss scale follows its flags, identically on all ranks"""
    first, second = outcomes.of(f"dynamic {layout}")
    assert first["skipped"] == second["skipped"]
    assert first["scales"] == second["scales"]
    assert first["skipped"] == [step in OVERFLOWS for step in range(1, STEPS + 1)]
    scales = first["scales"]
    assert scales == expected_scales(first["skipped"], hysteresis_of(layout[0]))
    ratios = {after / before for before, after in itertools.pairwise(scales)}
    assert ratios == {0.5, 1.0, 2.0}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_skipped_step_changes_neither_weights_nor_moments_nor_learning_rate(
    layout: tuple[int, int], outcomes: JobResults
) -> None:
    """Nor Muon's momentum and SOAP's averages: what is not finite would stay so in all later
    steps."""
    peak = OPTIMIZERS[OPTIMIZER_OF[layout[0]]].lr
    for seen in outcomes.of(f"dynamic {layout}"):
        assert seen["has moments"]
        assert seen["changed"] == []
        steps = zip(seen["skipped"], seen["norms"], seen["applied"], seen["rates"], strict=True)
        applied = 0
        for skipped, norm, counted, rate in steps:
            assert rate == pytest.approx(1e-3 + (peak - 1e-3) * applied / 50, rel=1e-12)
            assert math.isfinite(norm) != skipped
            applied += not skipped
            assert counted == applied


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fp16_follows_fp32(layout: tuple[int, int], outcomes: JobResults) -> None:
    """Losses to 2e-3 nats and norms, unscaled, to a hundredth.

    Claim (precision): fp16 follows fp32, also on CPUs (`--allow-fp16-on-cpu`)
    """
    reference = reference_of("learned", "adamw")
    for run in outcomes.of(f"static {layout}"):
        assert run.notes["types"] == ["torch.float16", "torch.float32"]
        assert run.losses == pytest.approx(reference.losses, rel=0, abs=2e-3)
        assert run.losses != reference.losses
        assert run.norms == pytest.approx(reference.norms, rel=0.01)
