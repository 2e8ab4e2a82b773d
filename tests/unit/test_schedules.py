"""Schedules compared with tables of expected values and with step-by-step simulation.

Claim (schedules): learning rate, weight decay and batch size schedules are Megatron's
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from megatron_ds import schedule_validation, schedules
from megatron_ds.config import Config
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import StepResult, TrainState
from tests.tables import tables

TABLES = tables(__file__)

SEQUENCE = 10


def config_with(schedule: dict[str, Any], optimizer: dict[str, Any] | None = None) -> Config:
    values = {"seq_length": SEQUENCE, "micro_batch_size": 1, "lr": 1.0}
    return Config().with_values({**values, **schedule, **(optimizer or {})})


def after(applied_samples: int) -> TrainState:
    return TrainState(applied_samples=applied_samples, applied_tokens=SEQUENCE * applied_samples)


BY_SAMPLES = TABLES["by_samples"]
WARMUP = {0: 0.0, 50: 0.5, 100: 1.0}
WSD_START = {**WARMUP, 200: 1.0, 300: 1.0}
# Maximum 1.0, minimum 0.1, warmup until 100, decay until 500, WSD annealing from 300.
LEARNING_RATES = {
    ("constant", ""): {**WARMUP, 101: 1.0, 500: 1.0, 900: 1.0},
    ("linear", ""): {**WARMUP, 200: 0.775, 300: 0.55, 500: 0.1, 501: 0.1, 900: 0.1},
    ("cosine", ""): {**WARMUP, 200: 0.8681980515, 300: 0.55, 400: 0.2318019485, 500: 0.1, 900: 0.1},
    ("inverse-square-root", ""): {
        **WARMUP,
        225: 0.6666666667,
        400: 0.5,
        500: 0.4472135955,
        501: 0.1,
    },
    ("WSD", "linear"): {**WSD_START, 350: 0.775, 400: 0.55, 500: 0.1, 900: 0.1},
    ("WSD", "cosine"): {**WSD_START, 350: 0.8681980515, 400: 0.55, 500: 0.1, 900: 0.1},
    ("WSD", "exponential"): {**WSD_START, 350: 0.7136135475, 400: 0.4727922061, 500: 0.1, 900: 0.1},
    ("WSD", "minus_sqrt"): {**WSD_START, 350: 0.55, 400: 0.3636038969, 500: 0.1, 900: 0.1},
}


def one_minus_root(position: int) -> float:
    return 1.0 - 0.9 * math.sqrt((position - 100) / 400)


# Rates after a warmup until 100, and until the end of the decay at 500, as formulas.
FORMULAS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "minus_sqrt": ({}, one_minus_root),
    "power": ({"lr_decay_power": 0.51}, lambda position: max(0.1, (100 / position) ** 0.51)),
    # One step of 10 samples ahead.
    "deepspeed-cosine": (
        {},
        lambda position: 0.1 + 0.45 * (1 + math.cos(math.pi * min(1, (position + 10 - 100) / 400))),
    ),
    "piecewise": (
        {},
        lambda position: float(numpy.interp(position, (200, 300, 400, 450), (1, 0.5, 0.2, 0))),
    ),
}


@pytest.mark.parametrize("style", FORMULAS)
@pytest.mark.parametrize("unit", ["samples", "iters", "tokens"])
def test_learning_rate_follows_its_formula(style: str, unit: str) -> None:
    """Of the points, the unit is the run length's.

    Claim (schedules): the 1-sqrt decay, the power law and the piecewise rate follow their formulas
    """
    changes, formula = FORMULAS[style]
    size = {"samples": 1, "iters": 0.1, "tokens": SEQUENCE}[unit]
    lengths = {"train": 500, "lr_warmup": 100, "lr_decay": 500}
    settings = {f"{name}_{unit}": int(length * size) for name, length in lengths.items()}
    if style == "piecewise":
        points = ((200, "1"), (300, "0.5"), (400, "2e-1"), (450, "0"))
        entries = [f"{int(position * size)}:{factor}" for position, factor in points]
        changes = {"lr_decay_points": (entries[0], ",".join(entries[1:]))}
    config = config_with(
        {"global_batch_size": 10, "min_lr": 0.1, "lr_decay_style": style, **settings, **changes}
    )
    assert list(config.schedule.problems(config.parallel, 1)) == []
    assert list(schedule_validation.problems(config, 1)) == []
    steps = range(100, 501, 10)
    rates = [schedules.learning_rate(config, after(position), 1) for position in steps]
    assert rates == pytest.approx([formula(position) for position in steps], abs=1e-12)
    last = 0.0 if style == "piecewise" else 0.1
    assert schedules.learning_rate(config, after(510), 1) == pytest.approx(last)


def test_the_stable_phase_is_the_constant_rate_to_the_last_bit() -> None:
    """So that a decay can be forked from a run without one."""
    bounds = {"lr": 3e-4, "min_lr": 1e-5, "lr_wsd_decay_samples": 200}
    runs = [
        config_with({**BY_SAMPLES, "lr_decay_style": style} | bounds)
        for style in ("constant", "WSD")
    ]
    for done in range(0, 301, 10):
        assert len({schedules.learning_rate(run, after(done), 1) for run in runs}) == 1


@pytest.mark.parametrize(
    ("points", "wrong"),
    [(None, ""), (("0:1", "10"), "10"), (("0:1", "5:1.5"), "5:1.5"), (("7:1", "7:0.5"), "7:0.5")],
)
def test_malformed_points_of_the_rate_are_reported(
    points: tuple[str, ...] | None, wrong: str
) -> None:
    config = config_with(
        {"train_iters": 10, "lr_decay_style": "piecewise", "lr_decay_points": points}
    )
    (problem,) = config.schedule.problems(config.parallel, 1)
    assert (problem.code, repr(wrong) in str(problem)) == ("malformed-rate-point", True)


@pytest.mark.parametrize(("style", "annealing"), LEARNING_RATES)
def test_learning_rate_follows_the_table(style: str, annealing: str) -> None:
    settings = {**BY_SAMPLES, "lr_decay_style": style}
    if style == "WSD":
        settings |= {"lr_wsd_decay_style": annealing, "lr_wsd_decay_samples": 200}
    config = config_with(settings)
    table = LEARNING_RATES[style, annealing]
    rates = {done: schedules.learning_rate(config, after(done), 1) for done in table}
    assert rates == pytest.approx(table, abs=1e-9)


def test_lengths_in_iterations_are_converted_by_the_global_batch_size() -> None:
    config = config_with(
        {"train_iters": 10, "global_batch_size": 4, "lr_warmup_iters": 2, "min_lr": 0.1}
    )
    table = {0: 0.0, 4: 0.5, 8: 1.0, 24: 0.55, 40: 0.1}
    rates = {done: schedules.learning_rate(config, after(done), 2) for done in table}
    assert rates == pytest.approx(table)


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ({}, {0: 1.0}),
        ({"lr_warmup_samples": 100, "lr_warmup_init": 0.2}, {0: 0.2, 50: 0.6}),
        (
            {"lr_warmup_samples": 100, "lr_warmup_init": 0.2, "lr_warmup_style": "log"},
            {0: 0.2, 20: 0.2 + 0.8 * math.log(3) / math.log(10), 90: 1.0, 100: 1.0, 101: 0.99775},
        ),
        ({"lr_warmup_samples": 5, "lr_warmup_style": "log"}, {0: 0.0, 10: 1.0, 20: 1.0}),
        (
            {"lr_warmup_tokens": 1000, "lr_decay_samples": 0, "lr_warmup_style": "log"},
            {20: math.log(3) / math.log(10)},
        ),
        # Relative to the decay.
        ({"lr_warmup_fraction": 0.25}, {25: 0.2, 125: 1.0}),
    ],
)
def test_warmup_begins_and_ends_as_given(changes: dict[str, Any], table: dict[int, float]) -> None:
    config = config_with({**BY_SAMPLES, "lr_warmup_samples": 0, **changes})
    rates = {done: schedules.learning_rate(config, after(done), 1) for done in table}
    assert rates == pytest.approx(table)


def test_decoupled_learning_rate_has_the_schedule_with_bounds_of_its_own() -> None:
    schedule = {**BY_SAMPLES, "lr_decay_style": "linear"}
    assert schedules.plan(config_with(schedule), after(200), 1).decoupled_lr is None
    for floor, at_200, at_end in ((None, 2.275, 0.1), (0.2, 2.3, 0.2)):
        config = config_with(schedule, {"decoupled_lr": 3.0, "decoupled_min_lr": floor})
        plan = schedules.plan(config, after(200), 1)
        assert (plan.lr, plan.decoupled_lr) == pytest.approx((0.775, at_200))
        assert schedules.plan(config, after(50), 1).decoupled_lr == pytest.approx(1.5)
        assert schedules.plan(config, after(900), 1).decoupled_lr == pytest.approx(at_end)


@pytest.mark.parametrize(("style", "table"), TABLES["weight_decay_follows_the_table"])
def test_weight_decay_follows_the_table(style: str, table: dict[int, float]) -> None:
    bounds = {} if style == "constant" else {"start_weight_decay": 0.1, "end_weight_decay": 0.3}
    config = config_with(BY_SAMPLES, {"weight_decay_incr_style": style, **bounds})
    values = {done: schedules.weight_decay(config, after(done), 1) for done in table}
    assert values == pytest.approx(table)


def batches(config: Config, dp_size: int, count: int) -> list[int]:
    """The first global batch sizes of a run."""
    state = TrainState()
    sizes = []
    for _ in range(count):
        plan = schedules.plan(config, state, dp_size)
        sizes.append(plan.global_batch_size)
        state = state.advance(plan, StepResult(loss=1.0, grad_norm=1.0))
    return sizes


@pytest.mark.parametrize(("rampup", "final", "expected"), TABLES["ramp_ups"])
def test_batch_size_ramps_up_with_consumed_samples(
    rampup: tuple[int, int, int] | None, final: int, expected: list[int]
) -> None:
    config = config_with(
        {"train_samples": 1000, "global_batch_size": final, "rampup_batch_size": rampup}
    )
    assert batches(config, 1, len(expected)) == expected


def test_tokens_left_follow_the_batch_size_and_end_at_the_exit_interval() -> None:
    """Batches of 4, 4, 8, 12, then 16 samples of 10 tokens.

    Claim (logging): the time left follows the batch size and ends at the next exit condition
    """
    rampup = {"global_batch_size": 16, "rampup_batch_size": (4, 4, 24), "train_samples": 60}
    config = config_with(rampup)
    state = TrainState(1, 4, 40)
    assert RunPhases(config, 1).tokens_left(state) == 10 * (4 + 8 + 12 + 16 + 16)
    assert RunPhases(config, 1).tokens_left(TrainState(6, 60, 600)) == 0
    config = config.with_values({"exit_interval": 3})
    assert RunPhases(config, 1).tokens_left(state) == 10 * (4 + 8)
    assert RunPhases(config, 1).tokens_left(TrainState(3, 16, 160)) == 0  # the run exits here
    assert RunPhases(config, 1).tokens_left(TrainState(4, 28, 280)) == 10 * (16 + 16)


def test_plan_counts_micro_batches_per_rank() -> None:
    config = config_with(
        {**BY_SAMPLES, "micro_batch_size": 2, "global_batch_size": 24, "lr_decay_style": "linear"}
    )
    state = TrainState(iteration=4, consumed_samples=96, applied_samples=50, applied_iterations=2)
    plan = schedules.plan(config, state, dp_size=3)
    assert (plan.iteration, plan.global_batch_size, plan.num_micro_batches) == (5, 24, 4)
    assert (plan.lr, plan.weight_decay) == (pytest.approx(0.5), 0.01)


def test_planned_samples_cover_training_and_evaluation() -> None:
    with_evaluation = {"train_iters": 10, "micro_batch_size": 2, "eval_iters": 3}
    without = {"train_samples": 33, "global_batch_size": 8, "eval_iters": 0}
    assert schedules.planned_samples(config_with(with_evaluation), dp_size=4) == (80, 24, 24)
    assert schedules.planned_samples(config_with(without), dp_size=4) == (33, 0, 0)


# Skipped iterations.


def test_ranges_of_skipped_iterations_are_joined() -> None:
    ranges = ("9-12", "3", "4-5", "11-20", "30-30")
    config = config_with({"train_iters": 50, "skip_train_iteration_range": ranges})
    assert config.schedule.skipped_ranges == ((3, 5), (9, 20), (30, 30))
    found = [schedules.skipped_range(config, at) for at in (2, 3, 5, 6, 9, 20, 21, 30)]
    assert found == [None, (3, 5), (3, 5), None, (9, 20), (9, 20), None, (30, 30)]
