"""fp16 on two ranks: agreement with fp32, and the loss scale on all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import PrecisionConfig
from megatron_ds.parallel.mesh import Mesh
from tests.dist import parity_cases
from tests.dist.engine_harness import train
from tests.dist.nonfinite_harness import (
    WORLD,
    Layout,
    Training,
    corrupt_gradient,
    differing_names,
    run_layouts,
)
from tests.dist.parity_cases import Case, config_of, plans_of
from tests.dist.reference import Samples, train_reference

FP16 = PrecisionConfig(fp16=True, allow_fp16_on_cpu=True)
STATIC = dataclasses.replace(FP16, loss_scale=512.0)
STEPS = 14
OVERFLOWS = (1, 2, 3, 8, 9, 13)
"""Steps in which one rank's gradient is corrupted. No other step overflows: at the highest scale
reached, 2^12, gradients of up to 16 are representable."""
FIRST_SCALE, WINDOW = 2.0**10, 2
SAMPLES = Samples(parity_cases.STEPS * parity_cases.SAMPLES_PER_STEP, parity_cases.SHAPE)


def dynamic(hysteresis: int) -> PrecisionConfig:
    return dataclasses.replace(
        FP16, initial_loss_scale=FIRST_SCALE, loss_scale_window=WINDOW, hysteresis=hysteresis
    )


LAYOUTS = [(stage, tp) for stage in (1, 2, 3) for tp in (1, 2)]


def layout(stage: int, tp: int) -> Layout:
    return Layout(dynamic(hysteresis=1 + stage % 2), stage, tp)


def case(stage: int, tp: int) -> Case:
    return Case(WORLD, stage, tp, 2, "learned", "adamw")


def train_with_both_scales(layout: Layout, meshes: dict[int, Mesh], folder: Path) -> dict[str, Any]:
    """A run with corrupted gradients on one rank, and one with a static scale."""
    mesh = meshes[layout.tp]
    run = Training(layout.config(folder), mesh, STEPS)
    results, changed, applied_counts = [], [], []
    for step in range(1, STEPS + 1):
        before = run.state_tensors()
        if step in OVERFLOWS:
            with corrupt_gradient(run.engine, math.inf):
                results.append(run.step())
        else:
            results.append(run.step())
        if results[-1].skipped:
            changed += differing_names(before, run.state_tensors())
        applied_counts.append(run.state.applied_iterations)
    rates = run.rates
    run.close()

    which = case(layout.stage, layout.tp)
    config = dataclasses.replace(config_of(which, folder), precision=STATIC)
    static = train(config, mesh, SAMPLES, plans_of(which))
    return {
        "skipped": [result.skipped for result in results],
        "scales": [result.loss_scale for result in results],
        "norms": [result.grad_norm for result in results],
        "changed": changed,
        "moments": [name for name in before if name.startswith("exp_avg_sq")],
        "applied": applied_counts,
        "rates": rates,
        "types": static.notes["types"],
        "losses": static.losses,
        "static norms": static.norms,
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    layouts = [layout(*which) for which in LAYOUTS]
    return run_layouts(train_with_both_scales, layouts, tmp_path_factory.mktemp("fp16"))


def results_of(outcomes: dict[str, list[Any]], stage: int, tp: int) -> tuple[Any, Any]:
    first, second = outcomes[layout(stage, tp).name]
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    return first, second


def expected_scales(skipped: list[bool], hysteresis: int) -> list[float]:
    """Scales by DeepSpeed's rule.

    An overflow halves the scale once the hysteresis is used up. The scale doubles with every
    WINDOW-th good step after the first good one, which also restores the hysteresis.
    """
    scale, hysteresis_left, good = FIRST_SCALE, hysteresis, 0
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
                scale, hysteresis_left = scale * 2, hysteresis
        scales.append(scale)
    return scales


@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_loss_scale_follows_flags_on_all_ranks(
    stage: int, tp: int, outcomes: dict[str, list[Any]]
) -> None:
    first, second = results_of(outcomes, stage, tp)
    assert first["skipped"] == second["skipped"]
    assert first["scales"] == second["scales"]
    assert first["skipped"] == [step in OVERFLOWS for step in range(1, STEPS + 1)]
    scales = first["scales"]
    assert scales == expected_scales(first["skipped"], hysteresis=1 + stage % 2)
    ratios = {after / before for before, after in itertools.pairwise(scales)}
    assert ratios == {0.5, 1.0, 2.0}


@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_skipped_step_changes_neither_weights_nor_moments_nor_learning_rate(
    stage: int, tp: int, outcomes: dict[str, list[Any]]
) -> None:
    for seen in results_of(outcomes, stage, tp):
        assert seen["moments"] != []
        assert seen["changed"] == []
        steps = zip(seen["skipped"], seen["norms"], seen["applied"], seen["rates"], strict=True)
        applied = 0
        for skipped, norm, counted, rate in steps:
            assert rate == pytest.approx(1e-3 + (0.01 - 1e-3) * applied / 50, rel=1e-12)
            assert math.isfinite(norm) != skipped
            applied += not skipped
            assert counted == applied


@pytest.mark.parametrize(("stage", "tp"), LAYOUTS)
def test_fp16_follows_fp32(
    stage: int, tp: int, outcomes: dict[str, list[Any]], tmp_path: Path
) -> None:
    """Losses to 2e-3 nats and norms, unscaled, to a hundredth."""
    which = case(stage, tp)
    reference = train_reference(config_of(which, tmp_path), SAMPLES, plans_of(which))
    for seen in results_of(outcomes, stage, tp):
        assert seen["types"] == ["torch.float16", "torch.float32"]
        assert seen["losses"] == pytest.approx(reference.losses, rel=0, abs=2e-3)
        assert seen["losses"] != reference.losses
        assert seen["static norms"] == pytest.approx(reference.norms, rel=0.01)
