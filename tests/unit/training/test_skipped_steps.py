"""When skipped steps end a run, and which gradients are recorded before."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from megatron_ds.config import PrecisionConfig
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from megatron_ds.training import skipped_steps
from megatron_ds.training.skipped_steps import SkippedSteps
from tests.problems import printed_codes

GOOD = StepResult(1.0, 1.0)
SKIPPED = StepResult(1.0, math.inf, skipped=True)


def skips(module: nn.Module | None = None, **options: Any) -> SkippedSteps:
    named = () if module is None else tuple(module.named_parameters())
    norms = SimpleNamespace(parameters=named)
    steps: Any = SimpleNamespace(_steps=SimpleNamespace(norms=norms), _mesh=Mesh.single())
    engine: Any = SimpleNamespace(watch_gradients=lambda: ZeroEngine.watch_gradients(steps))
    return SkippedSteps(PrecisionConfig(**options), cast(Any, engine))


def stops_at(results: list[StepResult], **options: Any) -> int | None:
    """Number of the step after which the run must stop."""
    counted = skips(**options)
    return next((n for n, result in enumerate(results, 1) if counted.limit_reached(result)), None)


def test_only_consecutive_skips_count() -> None:
    broken = [SKIPPED, SKIPPED, GOOD, SKIPPED, SKIPPED, SKIPPED]
    assert stops_at(broken, max_consecutive_skipped_steps=3) == 6
    assert stops_at(broken[:5], max_consecutive_skipped_steps=3) is None
    assert stops_at([SKIPPED], max_consecutive_skipped_steps=1) == 1


def test_spikes_do_not_count() -> None:
    spike = StepResult(1.0, 9.0, skipped=True, is_spike=True)
    assert stops_at([spike] * 100) is None
    assert stops_at([SKIPPED, spike, SKIPPED], max_consecutive_skipped_steps=2) is None


def test_the_limit_is_fifty_by_default_and_zero_disables_it() -> None:
    assert stops_at([SKIPPED] * 100) == 50
    assert stops_at([SKIPPED] * 100, max_consecutive_skipped_steps=0) is None
    spent = StepResult(1.0, math.inf, skipped=True, loss_scale=1.0, loss_scale_exhausted=True)
    assert stops_at([spent], max_consecutive_skipped_steps=0) is None


def test_a_skip_at_the_minimum_scale_stops_immediately() -> None:
    at_lowest = StepResult(1.0, math.inf, skipped=True, loss_scale=1.0)
    spent = StepResult(1.0, math.inf, skipped=True, loss_scale=1.0, loss_scale_exhausted=True)
    assert stops_at([at_lowest, at_lowest, spent]) == 3


@pytest.mark.parametrize(
    ("before", "watched"),
    [
        ([], False),
        ([SKIPPED], False),
        ([SKIPPED, SKIPPED], True),
        ([SKIPPED, SKIPPED, GOOD], False),
        ([StepResult(1.0, 1.0, loss_scale=4.0)], False),
        ([StepResult(1.0, math.inf, skipped=True, loss_scale=4.0)], False),
    ],
)
def test_gradients_are_recorded_only_before_the_limit(
    before: list[StepResult], watched: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    counted = skips(model, max_consecutive_skipped_steps=3, min_loss_scale=4.0)
    for result in before:
        assert not counted.limit_reached(result)
    with counted.record_gradients():
        (model(torch.ones(1, 2)) * torch.tensor([1.0, math.inf])).sum().backward()
    recorded = [name for name, _ in counted._norms]
    assert recorded == ["1.bias", "1.weight", "0.bias", "0.weight"] * watched
    assert not any(norm.isfinite() for _, norm in counted._norms)
    assert counted.has_record == watched
    with counted.record_gradients(always=True):
        model(torch.ones(1, 2)).sum().backward()
    assert counted.has_record
    assert all(norm.isfinite() for _, norm in counted._norms)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize("weights", [[None, None], [None, "final_norm.bias"]])
def test_weights_that_are_not_finite_are_the_cause(
    monkeypatch: pytest.MonkeyPatch, weights: list[str | None]
) -> None:
    """Neither the rates nor the data are, which other runs are advised to change."""

    def gather(value: Any) -> list[Any]:
        return weights if value is None else [value]

    monkeypatch.setattr(skipped_steps, "gather_objects", gather)
    counted = skips(max_consecutive_skipped_steps=1)
    counted._engine.first_nonfinite_weight = lambda: None  # type: ignore[method-assign]
    assert counted.limit_reached(SKIPPED)
    plan = StepPlan(7, 8, 1, 0.1, 0.0, seq_length=16)
    error = counted.make_error(plan, SKIPPED, TrainState(), "Resume from global_step3")
    assert error.code == ExitCode.SKIPPED_STEPS
    is_named = weights[1] is not None
    code = "skipped-because-of-weights" if is_named else "too-many-skipped-steps"
    assert printed_codes(str(error)) == [code]
    assert ("final_norm.bias of rank 1" in str(error)) == is_named
    assert ("a longer warm-up" in str(error)) != is_named


@pytest.mark.parametrize(
    ("results", "is_finite", "code", "shown"),
    [
        ([GOOD] * 5 + [SKIPPED], True, None, ""),
        ([SKIPPED] * 9 + [GOOD], True, None, ""),
        ([], False, None, ""),
        ([SKIPPED] * 3, True, "all-steps-skipped", ""),
        ([GOOD] * 2 + [SKIPPED] * 10, False, "steps-skipped-at-the-end", "10 of 12"),
        ([GOOD] * 100 + [SKIPPED] * 10, True, "steps-skipped-at-the-end", "10 of 110"),
        ([GOOD, SKIPPED], True, "steps-skipped-at-the-end", "1 of 2"),
        ([GOOD] * 5, False, "steps-skipped-at-the-end", "validation"),
    ],
)
def test_a_run_that_stopped_learning_has_not_finished(
    results: list[StepResult], is_finite: bool, code: str | None, shown: str
) -> None:
    """Claim (non-finite): a run that ends with skipped steps or with a validation loss that is not
    finite says so and has a status of its own"""
    counted = skips()
    for result in results:
        counted.limit_reached(result)
    problem = counted.problem_at_the_end(1, [2.0, 3.0 if is_finite else math.nan])
    assert (problem and problem.code) == code
    assert problem is None or shown in problem
