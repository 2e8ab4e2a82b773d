"""Sequence length, batch sizes by tokens, clocks in tokens: tables, and walks step by step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds import schedules
from megatron_ds.config import Config, RecomputeConfig
from megatron_ds.train_state import StepPlan, StepResult, TrainState

LENGTH = 64


def config_with(length: int = LENGTH, lr: float = 1.0, **schedule: Any) -> Config:
    config = Config()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, seq_length=length),
        schedule=dataclasses.replace(config.schedule, **{"micro_batch_size": 1, **schedule}),
        optimizer=dataclasses.replace(config.optimizer, lr=lr),
    )


def walked(config: Config, dp_size: int = 1, start: TrainState | None = None) -> list[StepPlan]:
    """Every plan from a state to the end of the run, one step after the other."""
    state, plans = start or TrainState(), list[StepPlan]()
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


def problems(config: Config, dp_size: int = 1) -> list[str]:
    return [*config.schedule.problems(dp_size), *schedules.problems(config, dp_size)]


# Sequence length.


@pytest.mark.parametrize(
    ("curriculum", "step", "expected"),
    [
        # 8 + 24 k / 6 = 12, 16, 20, 24, 28, 32.
        ((8, 32, 6), 8, [8, 16, 16, 24, 24, 32, 32]),
        ((8, 32, 6), 4, [12, 16, 20, 24, 28, 32, 32]),
        # The end is met though it is no multiple of the step.
        ((8, 30, 4), 8, [8, 16, 24, 30, 30]),
        ((16, 64, 1), 8, [64, 64]),
        ((24, 24, 5), 8, [24, 24]),
        # More is grown in an iteration than a step: lengths are passed over.
        ((8, 64, 3), 8, [24, 40, 64, 64]),
    ],
)
def test_the_length_grows_as_deepspeeds_fixed_linear(
    curriculum: tuple[int, int, int], step: int, expected: list[int]
) -> None:
    config = config_with(train_iters=9, curriculum_seqlen=curriculum, curriculum_seqlen_step=step)
    found = [schedules.seq_length_at(config, done) for done in range(len(expected))]
    assert found == expected


def test_without_a_curriculum_the_length_is_the_models() -> None:
    assert schedules.seq_length_at(config_with(train_iters=9), 0) == LENGTH


# Batch sizes.


def test_the_batch_steps_with_the_tokens() -> None:
    config = config_with(10, train_samples=100, step_batch_size_schedule=("0:2 60:4 0.2K:8",))
    sizes = [plan.global_batch_size for plan in walked(config)]
    # 60 tokens are passed with the third step, 200 with the seventh.
    assert sizes == [2, 2, 2, 4, 4, 4, 4, *[8] * 9]
    assert config.final_global_batch_size(1) == 8


def test_a_threshold_is_rounded_down_to_samples_as_megatron_does() -> None:
    config = config_with(10, train_samples=100, step_batch_size_schedule=("0:1,25:4",))
    assert schedules.batch_size_steps(config) == [(0, 1), (20, 4)]
    assert [plan.global_batch_size for plan in walked(config)][:3] == [1, 1, 4]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("0:768 250B:1536 500b:3072",), ((0, 768), (250 * 10**9, 1536), (500 * 10**9, 3072))),
        (("0:768", "250B:1536"), ((0, 768), (250 * 10**9, 1536))),
        (("0:1,1.5K:2, 2M:3 1T:4",), ((0, 1), (1500, 2), (2 * 10**6, 3), (10**12, 4))),
    ],
)
def test_the_schedule_is_read_with_its_suffixes(
    words: tuple[str, ...], expected: tuple[tuple[int, int], ...]
) -> None:
    config = config_with(train_samples=10**9, step_batch_size_schedule=words)
    assert config.schedule.batch_size_steps == expected
    assert problems(config) == []


def test_a_schedule_of_trillions_is_not_walked_step_by_step() -> None:
    config = config_with(
        2048,
        train_tokens=10**15,
        step_batch_size_schedule=("0:768 250B:1536",),
        curriculum_seqlen=(64, 2048, 10**6),
    )
    stretches = list(schedules.constant_segments(config, 1))
    assert len(stretches) <= (2048 - 64) // 8 + 3
    total = schedules.total_iterations(config, 1)
    last = sum(steps * size * length for steps, size, length in stretches)
    assert 10**15 <= last < 10**15 + 1536 * 2048
    assert total == sum(stretch.steps for stretch in stretches)


# The whole run.


@st.composite
def runs(draw: st.DrawFn) -> Config:
    """Runs of any mixture of the schedules, short enough to be walked."""
    unit = draw(st.sampled_from((1, 2, 8)))
    schedule: dict[str, Any] = {"curriculum_seqlen_step": unit}
    length = draw(st.integers(1, 40))
    if length >= unit and draw(st.booleans()):
        start = unit * draw(st.integers(1, length // unit))
        end = draw(st.integers(start, length))
        schedule["curriculum_seqlen"] = (start, end, draw(st.integers(1, 60)))
    batches = draw(st.sampled_from(("constant", "rampup", "steps")))
    schedule["global_batch_size"] = final = draw(st.integers(1, 9))
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
def test_the_totals_are_those_of_a_walk_over_every_step(config: Config) -> None:
    assert problems(config) == []
    plans = walked(config)
    samples = sum(plan.global_batch_size for plan in plans)
    assert schedules.total_iterations(config, 1) == len(plans)
    tokens = sum(plan.global_batch_size * plan.seq_length for plan in plans)
    assert schedules.planned_tokens(config, 1) == tokens
    assert schedules.planned_samples(config, 1)[0] >= samples
    if config.schedule.train_samples is None and config.schedule.train_iters is None:
        assert schedules.planned_samples(config, 1)[0] == samples
    lengths = [plan.seq_length for plan in plans]
    assert lengths == sorted(lengths)
    assert all(0 < length <= config.model.sequence for length in lengths)
    assert all(line.startswith("--") for line in schedules.warnings(config, 1))


@settings(max_examples=60, deadline=None)
@given(runs(), st.data())
def test_a_resumed_run_plans_the_rest_alike(config: Config, data: st.DataObject) -> None:
    plans = walked(config)
    done = data.draw(st.integers(0, len(plans)))
    state = TrainState()
    for plan in plans[:done]:
        state = state.advance(plan, result_of(plan))
    resumed = TrainState.from_dict(state.to_dict())
    assert walked(config, start=resumed) == plans[done:]


@settings(max_examples=60, deadline=None)
@given(runs(), st.builds(TrainState, *[st.integers(0, 30)] + [st.integers(0, 1000)] * 2))
def test_totals_count_what_was_consumed_under_other_schedules(
    config: Config, state: TrainState
) -> None:
    plans = walked(config, start=state)
    samples = state.consumed_samples + sum(plan.global_batch_size for plan in plans)
    tokens = sum(plan.global_batch_size * plan.seq_length for plan in plans)
    if config.schedule.train_tokens is not None or config.schedule.train_samples is not None:
        assert schedules.total_iterations(config, 1, state) == state.iteration + len(plans)
        assert schedules.planned_tokens(config, 1, state) == state.consumed_tokens + tokens
    if config.schedule.train_iters is None and config.schedule.train_samples is None:
        assert schedules.planned_samples(config, 1, state)[0] == samples


# The learning rate's clock.


def rate(config: Config, samples: int, tokens: int) -> float:
    state = TrainState(applied_samples=samples, applied_tokens=tokens)
    return schedules.learning_rate(config, state, 1)


def test_the_rate_follows_tokens_where_its_lengths_are_tokens() -> None:
    config = config_with(
        train_samples=1000, curriculum_seqlen=(8, 64, 50), lr_decay_tokens=500, lr_warmup_tokens=100
    )
    assert schedules.lr_unit(config) == "tokens"
    table = {0: 0.0, 50: 0.5, 100: 1.0, 300: 0.5, 500: 0.0, 501: 0.0}
    for samples in (0, 999):
        found = {done: rate(config, samples, done) for done in table}
        assert found == pytest.approx(table)


def test_the_rate_follows_samples_where_no_length_is_in_tokens() -> None:
    config = config_with(train_samples=1000, train_tokens=10**6, lr_warmup_samples=100)
    assert schedules.lr_unit(config) == "samples"
    assert rate(config, 50, 10**9) == pytest.approx(0.5)


def test_a_run_measured_in_tokens_alone_decays_by_them() -> None:
    config = config_with(train_tokens=1000, lr_warmup_fraction=0.1)
    assert schedules.warmup_and_decay(config, 1) == (100, 1000)
    assert rate(config, 0, 550) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "schedule",
    [
        {"train_samples": 1000, "lr_decay_tokens": 500 * LENGTH, "lr_warmup_samples": 100},
        {"train_iters": 250, "lr_decay_iters": 125, "lr_warmup_tokens": 100 * LENGTH},
        {"train_tokens": 1000 * LENGTH, "lr_decay_samples": 500, "lr_warmup_iters": 25},
        {"train_samples": 500, "lr_warmup_tokens": 100 * LENGTH},
    ],
)
def test_units_agree_where_every_sample_has_its_full_length(schedule: dict[str, Any]) -> None:
    plain = config_with(
        global_batch_size=4, train_samples=1000, lr_decay_samples=500, lr_warmup_samples=100
    )
    mixed = config_with(global_batch_size=4, **schedule)
    assert problems(mixed) == []
    for done in range(0, 600, 20):
        assert rate(mixed, done, done * LENGTH) == pytest.approx(rate(plain, done, 0), abs=1e-12)


def test_annealing_may_be_told_in_tokens() -> None:
    config = config_with(
        train_tokens=1000,
        lr_decay_style="WSD",
        lr_wsd_decay_style="linear",
        lr_wsd_decay_tokens=200,
        curriculum_seqlen=(8, 64, 9),
    )
    assert problems(config) == []
    assert [rate(config, 0, done) for done in (0, 800, 900, 1000)] == [1.0, 1.0, 0.5, 0.0]


def test_weight_decay_moves_over_the_tokens_of_a_run_measured_in_them() -> None:
    config = config_with(train_tokens=1000)
    optimizer = dataclasses.replace(
        config.optimizer,
        weight_decay_incr_style="linear",
        start_weight_decay=0.1,
        end_weight_decay=0.3,
    )
    config = dataclasses.replace(config, optimizer=optimizer)
    found = [
        schedules.weight_decay(config, TrainState(applied_tokens=n), 1) for n in (0, 500, 2000)
    ]
    assert found == pytest.approx([0.1, 0.2, 0.3])


def test_a_skipped_step_moves_the_data_and_not_the_rate() -> None:
    config = config_with(
        10, train_tokens=1000, lr_warmup_tokens=100, step_batch_size_schedule=("0:1 10:2",)
    )
    first = schedules.plan(config, TrainState(), 1)
    state = TrainState().advance(first, StepResult(5.0, None, skipped=True))
    second = schedules.plan(config, state, 1)
    assert (first.global_batch_size, second.global_batch_size) == (1, 2)
    assert first.lr == second.lr == 0.0
    assert (state.consumed_tokens, state.applied_tokens) == (10, 0)


# The state.


def test_an_older_state_gets_its_tokens_by_its_samples() -> None:
    older = TrainState(9, 36, 36 * LENGTH, applied_samples=32, applied_tokens=32 * LENGTH).to_dict()
    expected = TrainState.from_dict(dict(older))
    del older["applied_tokens"]
    assert TrainState.from_dict(older) == expected
    empty = TrainState().to_dict()
    del empty["applied_tokens"]
    assert TrainState.from_dict(empty) == TrainState()


@pytest.mark.parametrize("key", ["applied_samples", "iteration"])
def test_a_state_without_another_key_is_refused(key: str) -> None:
    values = TrainState().to_dict()
    del values[key]
    with pytest.raises(ValueError, match="state has the keys"):
        TrainState.from_dict(values)


# What cannot be.

STEPS = "--step-batch-size-schedule"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            {"step_batch_size_schedule": ("0:2 5X:4 7:0",)},
            f"{STEPS}: '5X:4' is not TOKENS:BATCH, such as 250B:1536",
        ),
        ({"step_batch_size_schedule": ("0:2 5X:4 7:0",)}, f"{STEPS}: '7:0' is not TOKENS:BATCH"),
        ({"step_batch_size_schedule": ("0:2 0.0001K:4",)}, f"{STEPS}: '0.0001K:4' is not"),
        ({"step_batch_size_schedule": ()}, f"{STEPS}: give at least one entry, 0:BATCH"),
        (
            {"step_batch_size_schedule": ("1K:4",)},
            f"{STEPS} 1K:4: the first entry must begin at 0 tokens: 1K:4 does not",
        ),
        (
            {"step_batch_size_schedule": ("0:2 1M:4 1K:8",)},
            f"{STEPS} 0:2 1M:4 1K:8: the tokens must rise from entry to entry: 1K:8 follows 1M:4",
        ),
        (
            {"step_batch_size_schedule": ("0:2 10:6", "1M:8")},
            f"{STEPS}: the batch of 6 from 10 tokens on is not divisible by --micro-batch-size 2 x "
            "data-parallel size 2 = 4 (nearest: 4 or 8)",
        ),
        (
            {"step_batch_size_schedule": ("0:4",), "rampup_batch_size": (4, 4, 9)},
            f"--rampup-batch-size 4 4 9 and {STEPS} 0:4 exclude each other: both give the batch",
        ),
        (
            {"step_batch_size_schedule": ("0:4 1K:8",), "global_batch_size": 4},
            f"--global-batch-size 4 contradicts {STEPS} 0:4 1K:8, which ends at 8",
        ),
        (
            {"step_batch_size_schedule": ("0:4",), "train_samples": None, "train_iters": 7},
            f"{STEPS} 0:4 counts tokens: give --train-samples or --train-tokens instead of "
            "--train-iters 7",
        ),
        (
            {"curriculum_seqlen": (12, 64, 9)},
            "--curriculum-seqlen 12 64 9: its first length 12 is not a multiple of "
            "--curriculum-seqlen-step 8 (nearest: 8 or 16)",
        ),
        ({"curriculum_seqlen": (64, 32, 9)}, "its first length 64 is above its last, 32"),
        ({"curriculum_seqlen": (8, 64, 0)}, "the first length and the iterations must be positive"),
        (
            {"curriculum_seqlen": (8, 128, 9)},
            "--curriculum-seqlen 8 128 9: its last length 128 is above --seq-length 64",
        ),
        ({"curriculum_seqlen_step": 0}, "--curriculum-seqlen-step 0: must be positive"),
        (
            {"lr_decay_tokens": 9, "lr_decay_samples": 7},
            "--lr-decay-samples 7 and --lr-decay-tokens 9 exclude each other: both give the",
        ),
        (
            {"lr_warmup_tokens": 9, "lr_warmup_samples": 7},
            "--lr-warmup-samples 7 and --lr-warmup-tokens 9 exclude each other: both give the warm",
        ),
        (
            {"lr_warmup_tokens": 9, "lr_warmup_fraction": 0.1},
            "--lr-warmup-fraction 0.1 and --lr-warmup-tokens 9 exclude each other",
        ),
        (
            {"lr_warmup_tokens": 90, "lr_decay_tokens": 90},
            "--lr-warmup-tokens 90: the learning rate's warm-up must be shorter than its decay, "
            "--lr-decay-tokens 90 (give at most 89 tokens",
        ),
        (
            {"lr_warmup_samples": 2, "lr_decay_tokens": 90},
            "--lr-warmup-samples 2 (128 tokens): the learning rate's warm-up must be shorter",
        ),
        ({"train_tokens": 0}, "--train-tokens 0: must be positive"),
        ({"lr_decay_tokens": -1}, "--lr-decay-tokens -1: must be positive"),
        ({"lr_warmup_tokens": -1}, "--lr-warmup-tokens -1: must not be negative"),
        (
            {"lr_warmup_samples": 2, "lr_decay_tokens": 900, "curriculum_seqlen": (8, 64, 9)},
            "--lr-warmup-samples 2 counts samples, but the learning rate follows tokens, of which "
            "--curriculum-seqlen gives each sample another number: give --lr-warmup-tokens",
        ),
        (
            {"lr_warmup_tokens": 2, "curriculum_seqlen": (8, 64, 9)},
            "--train-samples 100 would end the learning rate's decay, but the learning rate "
            "follows tokens, of which --curriculum-seqlen gives each sample another number: give "
            "--lr-decay-tokens",
        ),
        (
            {
                "train_samples": None,
                "train_tokens": 9999,
                "lr_warmup_iters": 5,
                "step_batch_size_schedule": ("0:4 1K:8",),
            },
            f"--lr-warmup-iters 5 counts steps, whose size {STEPS} changes: give "
            "--lr-warmup-samples or --lr-warmup-tokens instead",
        ),
        ({"train_samples": None}, "--train-iters, --train-samples or --train-tokens is required"),
        (
            {"lr_decay_style": "WSD", "lr_decay_tokens": 900, "lr_wsd_decay_tokens": 901},
            "--lr-wsd-decay-tokens 901 is longer than what --lr-decay-tokens 900 leaves",
        ),
    ],
)
def test_what_cannot_be_is_named(schedule: dict[str, Any], message: str) -> None:
    config = config_with(**{"train_samples": 100, "micro_batch_size": 2, **schedule})
    found = problems(config, dp_size=2)
    assert any(message in line for line in found), found


def test_a_contiguous_buffer_and_a_curriculum_exclude_each_other() -> None:
    config = config_with(train_samples=100, curriculum_seqlen=(8, 64, 9))
    config = dataclasses.replace(config, recompute=RecomputeConfig(contigious_checkpointing=True))
    (problem,) = problems(config)
    assert problem.startswith("--curriculum-seqlen 8 64 9 and --contigious-checkpointing exclude")


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"train_iters": 9, "curriculum_seqlen": (8, 64, 9)}, []),
        (
            {"train_iters": 9, "curriculum_seqlen": (8, 64, 18)},
            [
                "--curriculum-seqlen 8 64 18: the run ends after 9 iterations, at a length of 32",
            ],
        ),
        (
            {"train_iters": 9, "curriculum_seqlen": (8, 48, 9)},
            [
                "--curriculum-seqlen 8 48 9 ends below --seq-length 64: the last 16 tokens of each "
                "sample are never trained on"
            ],
        ),
        (
            {"train_iters": 9, "train_tokens": 640},
            [
                "--train-tokens 640 is not reached: --train-iters 9 ends the run after 576 tokens",
            ],
        ),
        ({"train_samples": 9, "train_tokens": 500, "global_batch_size": 2}, []),
        (
            {"train_samples": 9, "step_batch_size_schedule": ("0:1 576:3",)},
            [
                f"{STEPS}: the run ends after 576 tokens, before the batch of 3 begins at 576",
            ],
        ),
    ],
)
def test_what_is_sound_and_may_surprise_is_remarked(
    schedule: dict[str, Any], words: list[str]
) -> None:
    config = config_with(**schedule)
    assert problems(config) == []
    assert list(schedules.warnings(config, 1)) == words


def test_the_courses_are_told_in_words() -> None:
    config = config_with(
        2048,
        train_tokens=10**12,
        step_batch_size_schedule=("0:768 250B:1536",),
        curriculum_seqlen=(64, 2048, 1000),
    )
    assert schedules.describe_schedules(config) == [
        ("batch sizes", "768 from 0 tokens on, 1536 from 249,999,998,976 tokens on"),
        ("sequence length", "64 -> 2048 over 1,000 iterations, in multiples of 8"),
    ]
    assert schedules.describe_schedules(config_with(train_iters=5)) == []
