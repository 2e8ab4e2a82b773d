"""Schedules of sequence length and batch size, and schedules in tokens: tables, and comparison with
a step-by-step simulation.

Claim (schedules): its totals equal a walk over every step, and a resumed run plans the remaining
steps identically
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds import schedule_validation, schedules
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from tests.problems import codes, raises_problem
from tests.tables import tables

TABLES = tables(__file__)

LENGTH = 64


def config_with(length: int = LENGTH, lr: float = 1.0, **schedule: Any) -> Config:
    values = {"seq_length": length, "lr": lr, "micro_batch_size": 1}
    return Config().with_values({**values, **schedule})


def simulated(config: Config, dp_size: int = 1, start: TrainState | None = None) -> list[StepPlan]:
    """Plan every step from a state to the end of the run."""
    state = start or TrainState()
    plans = list[StepPlan]()
    schedule = config.schedule
    while schedule.train_iters is None or state.iteration < schedule.train_iters:
        plan = schedules.plan(config, state, dp_size)
        samples = state.consumed_samples + plan.global_batch_size
        if schedule.train_samples is not None and samples > schedule.train_samples:
            break
        if schedule.train_tokens is not None and state.consumed_tokens >= schedule.train_tokens:
            break
        plans.append(plan)
        state = state.advance(plan, result_of(plan))
    return plans


def result_of(plan: StepPlan) -> StepResult:
    """Every fifth step is skipped."""
    return StepResult(1.0, None, skipped=plan.iteration % 5 == 0)


def problems(config: Config, dp_size: int = 1) -> list[Problem]:
    return [
        *config.schedule.problems(config.parallel, dp_size),
        *schedule_validation.problems(config, dp_size),
    ]


# Sequence length.


@pytest.mark.parametrize(("curriculum", "step", "expected"), TABLES["lengths"])
def test_sequence_length_grows_as_deepspeeds_fixed_linear(
    curriculum: tuple[int, int, int], step: int, expected: list[int]
) -> None:
    config = config_with(train_iters=9, curriculum_seqlen=curriculum, curriculum_seqlen_step=step)
    found = [schedules.seq_length_at(config, count) for count in range(len(expected))]
    assert found == expected


# Batch sizes.


def test_batch_size_follows_consumed_tokens() -> None:
    config = config_with(10, train_samples=100, step_batch_size_schedule=("0:2 60:4 0.2K:8",))
    sizes = [plan.global_batch_size for plan in simulated(config)]
    # The third step passes 60 tokens, the seventh 200.
    assert sizes == [2, 2, 2, 4, 4, 4, 4, *[8] * 9]
    assert config.final_global_batch_size(1) == 8


def test_batch_size_threshold_is_rounded_down_to_samples() -> None:
    config = config_with(10, train_samples=100, step_batch_size_schedule=("0:1,25:4",))
    assert schedules.batch_size_steps(config) == [(0, 1), (20, 4)]
    assert [plan.global_batch_size for plan in simulated(config)][:3] == [1, 1, 4]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("0:768 250B:1536 500b:3072",), ((0, 768), (250 * 10**9, 1536), (500 * 10**9, 3072))),
        (("0:768", "250B:1536"), ((0, 768), (250 * 10**9, 1536))),
        (("0:1,1.5K:2, 2M:3 1T:4",), ((0, 1), (1500, 2), (2 * 10**6, 3), (10**12, 4))),
    ],
)
def test_batch_size_schedule_is_parsed_with_suffixes(
    arguments: tuple[str, ...], expected: tuple[tuple[int, int], ...]
) -> None:
    config = config_with(train_samples=10**9, step_batch_size_schedule=arguments)
    assert config.schedule.batch_size_steps == expected
    assert problems(config) == []


LONG = config_with(
    2048,
    train_tokens=10**15,
    step_batch_size_schedule=("0:768 250B:1536",),
    curriculum_seqlen=(64, 2048, 10**6),
)


def test_long_schedule_is_computed_by_segments() -> None:
    segments = list(schedules.constant_segments(LONG, 1))
    assert len(segments) <= (2048 - 64) // 8 + 3
    total = schedules.total_iterations(LONG, 1)
    last = sum(steps * size * length for steps, size, length in segments)
    assert 10**15 <= last < 10**15 + 1536 * 2048
    assert total == sum(segment.steps for segment in segments)


# Totals of a run.


@st.composite
def runs(draw: st.DrawFn) -> Config:
    """Runs with any combination of schedules, short enough to simulate."""
    unit = draw(st.sampled_from((1, 2, 8)))
    schedule: dict[str, Any] = {"curriculum_seqlen_step": unit}
    length = draw(st.integers(1, 40))
    if length >= unit and draw(st.booleans()):
        start = unit * draw(st.integers(1, length // unit))
        end = draw(st.integers(start, length))
        schedule["curriculum_seqlen"] = (start, end, draw(st.integers(1, 60)))
    batches = draw(st.sampled_from(("constant", "rampup", "steps")))
    schedule["global_batch_size"] = draw(st.integers(1, 9))
    final = schedule["global_batch_size"]
    if batches == "rampup":
        start = draw(st.integers(1, final))
        increment = draw(st.sampled_from([n for n in range(1, 9) if (final - start) % n == 0]))
        schedule["rampup_batch_size"] = (start, increment, draw(st.integers(0, 100)))
    elif batches == "steps":
        starts = sorted(draw(st.sets(st.integers(1, 60), max_size=4)))
        sizes = [draw(st.integers(1, 9)) for _ in range(len(starts) + 1)]
        pairs = zip([0, *(start * length for start in starts)], sizes, strict=True)
        schedule["step_batch_size_schedule"] = tuple(f"{start}:{size}" for start, size in pairs)
        schedule["global_batch_size"] = None
    ends = draw(st.sampled_from(("samples", "tokens", "samples tokens", "iters", "iters tokens")))
    if batches != "constant":
        ends = ends.replace("iters", "samples")
    for unit_of_end in ends.split():
        longest = {"iters": 60, "samples": 200, "tokens": 200 * length}[unit_of_end]
        schedule[f"train_{unit_of_end}"] = draw(st.integers(9, longest))
    if "tokens" in ends and draw(st.booleans()):
        schedule["lr_decay_tokens"] = draw(st.integers(2, 300 * length))
        schedule["lr_warmup_tokens"] = schedule["lr_decay_tokens"] // 3
    return config_with(length, **schedule)


@settings(max_examples=150, deadline=None)
@given(runs())
def test_totals_equal_those_of_a_simulation(config: Config) -> None:
    assert problems(config) == []
    plans = simulated(config)
    samples = sum(plan.global_batch_size for plan in plans)
    assert schedules.total_iterations(config, 1) == len(plans)
    tokens = sum(plan.global_batch_size * plan.seq_length for plan in plans)
    assert schedules.run_totals(config, 1).tokens == tokens
    assert schedules.planned_samples(config, 1)[0] >= samples
    if config.schedule.train_samples is None and config.schedule.train_iters is None:
        assert schedules.planned_samples(config, 1)[0] == samples
    lengths = [plan.seq_length for plan in plans]
    assert lengths == sorted(lengths)
    assert all(0 < length <= config.model.seq_length for length in lengths)
    codes(schedule_validation.warnings(config, 1))


@settings(max_examples=60, deadline=None)
@given(runs(), st.data())
def test_resumed_run_plans_the_same_steps(config: Config, data: st.DataObject) -> None:
    plans = simulated(config)
    done = data.draw(st.integers(0, len(plans)))
    state = TrainState()
    for plan in plans[:done]:
        state = state.advance(plan, result_of(plan))
    resumed = TrainState.from_dict(state.to_dict())
    assert simulated(config, start=resumed) == plans[done:]


@settings(max_examples=60, deadline=None)
@given(runs(), st.builds(TrainState, *[st.integers(0, 30)] + [st.integers(0, 1000)] * 2))
def test_totals_include_progress_under_other_schedules(config: Config, state: TrainState) -> None:
    plans = simulated(config, start=state)
    samples = state.consumed_samples + sum(plan.global_batch_size for plan in plans)
    tokens = sum(plan.global_batch_size * plan.seq_length for plan in plans)
    if config.schedule.train_tokens is not None or config.schedule.train_samples is not None:
        assert schedules.total_iterations(config, 1, state) == state.iteration + len(plans)
        assert schedules.run_totals(config, 1, state).tokens == state.consumed_tokens + tokens
    if config.schedule.train_iters is None and config.schedule.train_samples is None:
        assert schedules.planned_samples(config, 1, state)[0] == samples


# Unit of the learning rate schedule.


def rate(config: Config, samples: int, tokens: int) -> float:
    state = TrainState(applied_samples=samples, applied_tokens=tokens)
    return schedules.learning_rate(config, state, 1)


def test_learning_rate_follows_tokens_if_a_length_is_in_tokens() -> None:
    config = config_with(
        train_samples=1000, curriculum_seqlen=(8, 64, 50), lr_decay_tokens=500, lr_warmup_tokens=100
    )
    assert schedules.lr_unit(config) == "tokens"
    table = {0: 0.0, 50: 0.5, 100: 1.0, 300: 0.5, 500: 0.0, 501: 0.0}
    for samples in (0, 999):
        found = {count: rate(config, samples, count) for count in table}
        assert found == pytest.approx(table)


WARMUP = {"train_samples": 1000, "train_tokens": 10**6, "lr_warmup_samples": 100}


@pytest.mark.parametrize(
    ("schedule", "unit", "samples", "tokens"),
    [
        (WARMUP, "samples", 50, 10**9),
        # The run is in tokens only.
        ({"train_tokens": 1000, "lr_warmup_fraction": 0.1}, "tokens", 0, 50),
        ({"train_tokens": 1000, "lr_warmup_fraction": 0.1}, "tokens", 0, 550),
    ],
)
def test_learning_rate_follows_the_unit_of_its_lengths(
    schedule: dict[str, Any], unit: str, samples: int, tokens: int
) -> None:
    config = config_with(**schedule)
    assert schedules.lr_unit(config) == unit
    assert rate(config, samples, tokens) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "schedule",
    [
        {"train_samples": 1000, "lr_decay_tokens": 500 * LENGTH, "lr_warmup_samples": 100},
        {"train_iters": 250, "lr_decay_iters": 125, "lr_warmup_tokens": 100 * LENGTH},
        {"train_tokens": 1000 * LENGTH, "lr_decay_samples": 500, "lr_warmup_iters": 25},
        {"train_samples": 500, "lr_warmup_tokens": 100 * LENGTH},
    ],
)
def test_units_agree_without_curriculum(schedule: dict[str, Any]) -> None:
    plain = config_with(
        global_batch_size=4, train_samples=1000, lr_decay_samples=500, lr_warmup_samples=100
    )
    mixed = config_with(global_batch_size=4, **schedule)
    assert problems(mixed) == []
    for count in range(0, 600, 20):
        assert rate(mixed, count, count * LENGTH) == pytest.approx(rate(plain, count, 0), abs=1e-12)


def test_a_warmup_in_samples_of_a_curriculum_is_that_of_the_forks() -> None:
    """Linear in samples; the decay in tokens begins at the tokens that these samples have."""
    config = config_with(
        global_batch_size=4,
        train_samples=400,
        curriculum_seqlen=(8, 64, 50),
        lr_warmup_samples=80,
        lr_decay_tokens=12_000,
    )
    assert problems(config) == []
    samples = 0
    tokens = 0
    warmup_tokens = 0
    for step in range(100):
        if samples <= 80:
            expected = samples / 80
            warmup_tokens = tokens
        else:
            expected = max(0.0, 1 - (tokens - warmup_tokens) / (12_000 - warmup_tokens))
        assert rate(config, samples, tokens) == pytest.approx(expected, abs=1e-12), step
        tokens += 4 * schedules.seq_length_at(config, step)
        samples += 4
    assert tokens > 12_000


def test_lengths_in_samples_of_a_curriculum_are_converted_to_tokens() -> None:
    config = config_with(train_iters=10, curriculum_seqlen=(8, 16, 2), lr_decay_tokens=900)
    # Steps of 8 and 16 tokens, then, after the run, samples of the full length.
    assert [schedules.tokens_of_samples(config, count, 1) for count in (1, 2, 10, 12)] == [
        8,
        24,
        152,
        152 + 2 * LENGTH,
    ]


def test_wsd_annealing_can_be_given_in_tokens() -> None:
    config = config_with(
        train_tokens=1000,
        lr_decay_style="WSD",
        lr_wsd_decay_style="linear",
        lr_wsd_decay_tokens=200,
        curriculum_seqlen=(8, 64, 9),
    )
    assert problems(config) == []
    assert [rate(config, 0, count) for count in (0, 800, 900, 1000)] == [1.0, 1.0, 0.5, 0.0]


def test_weight_decay_follows_tokens_if_only_the_run_is_in_tokens() -> None:
    decay = {"start_weight_decay": 0.1, "end_weight_decay": 0.3}
    config = config_with(train_tokens=1000, weight_decay_incr_style="linear", **decay)
    states = [TrainState(applied_tokens=count) for count in (0, 500, 2000)]
    found = [schedules.weight_decay(config, state, 1) for state in states]
    assert found == pytest.approx([0.1, 0.2, 0.3])


def test_skipped_step_advances_data_but_not_learning_rate() -> None:
    config = config_with(
        10, train_tokens=1000, lr_warmup_tokens=100, step_batch_size_schedule=("0:1 10:2",)
    )
    first = schedules.plan(config, TrainState(), 1)
    state = TrainState().advance(first, StepResult(5.0, None, skipped=True))
    second = schedules.plan(config, state, 1)
    assert (first.global_batch_size, second.global_batch_size) == (1, 2)
    assert first.lr == second.lr == 0.0
    assert (state.consumed_tokens, state.applied_tokens) == (10, 0)


# Saved state.


def test_applied_tokens_of_an_older_state_are_derived() -> None:
    older = TrainState(9, 36, 36 * LENGTH, applied_samples=32, applied_tokens=32 * LENGTH).to_dict()
    expected = TrainState.from_dict(dict(older))
    del older["applied_tokens"]
    assert TrainState.from_dict(older) == expected
    empty = TrainState().to_dict()
    del empty["applied_tokens"]
    assert TrainState.from_dict(empty) == TrainState()


@pytest.mark.parametrize("key", ["applied_samples", "iteration"])
def test_state_without_a_key_is_rejected(key: str) -> None:
    values = TrainState().to_dict()
    del values[key]
    with raises_problem("train-state-keys-differ"):
        TrainState.from_dict(values)


def test_schedules_are_described() -> None:
    assert schedules.describe_schedules(LONG) == [
        ("batch sizes", "768 from 0 tokens, 1536 from 249,999,998,976 tokens"),
        ("sequence length", "64 -> 2048 over 1,000,000 iterations, in multiples of 8"),
    ]
    assert schedules.describe_schedules(config_with(train_iters=5)) == []
