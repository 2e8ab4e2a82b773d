"""Checks of schedules that need the computed schedule; warnings of unexpected effects.

`Config.problems` checks the options themselves and is not repeated here. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.config.fields import exclusive_problem, in_effect
from megatron_ds.config.options.schedule import ENDLESS_STYLES, SCHEDULE_LENGTHS
from megatron_ds.config.phases import by_phase
from megatron_ds.config.problems import Problem, with_value
from megatron_ds.schedules import ScheduleLength, in_lr_units


def problems(config: Config, dp_size: int) -> Iterator[Problem]:
    """Check the schedules against each other and against the model.

    Args:
        dp_size: Data-parallel size; 0 if unknown.
    """
    if config.schedule.stages:
        yield from by_phase(config, lambda stage: problems(stage, dp_size))
        return
    schedule = in_effect(config.schedule)
    lr = config.optimizer.lr
    for name in ("lr_warmup_init", "min_lr"):
        if getattr(schedule, name) > lr:
            yield Problem("learning-rate-exceeds-maximum", name, "lr", settings=schedule, lr=lr)
    yield from _decoupled_lr_problems(config)
    has_one_length = schedule.train_iters is None or schedule.train_samples is None
    if has_one_length and all(len(schedule.given_lengths(stem)) < 2 for stem in SCHEDULE_LENGTHS):
        yield from _lr_length_problems(config, dp_size)
    if schedule.curriculum_seqlen is not None:
        end = schedule.curriculum_seqlen[1]
        longest = config.model.seq_length
        if longest > 0 and end > longest:
            yield Problem("curriculum-exceeds-sequence", settings=schedule, longest=longest)
        if in_effect(config.recompute).contiguous_checkpointing:
            yield exclusive_problem(
                "curriculum_seqlen",
                "contiguous_checkpointing",
                reason="the buffer is allocated for one sequence length",
            )
    if _is_countable(config, dp_size) and schedules.total_iterations(config, dp_size) == 0:
        first = schedules.batch_size_at(config, 0, 0, dp_size)
        yield Problem("run-shorter-than-one-batch", settings=schedule, first=first)


def warnings(config: Config, dp_size: int) -> Iterator[Problem]:
    """Warn of effects of a valid schedule that the user may not expect."""
    if config.schedule.stages:
        yield from by_phase(config, lambda stage: warnings(stage, dp_size))
        return
    if not _is_countable(config, dp_size):
        return
    schedule = config.schedule
    run = schedules.run_totals(config, dp_size)
    reaches_tokens = schedule.train_tokens is not None and run.tokens >= schedule.train_tokens
    samples = schedule.train_samples
    if samples is not None and run.samples < samples and not reaches_tokens:
        remaining = samples - run.samples
        yield Problem("incomplete-last-batch", settings=schedule, run=run, rest=remaining)
    if schedule.train_tokens is not None and not reaches_tokens:
        ended_by = "train_iters" if samples is None else "train_samples"
        yield Problem("tokens-not-reached", "train_tokens", ended_by, settings=schedule, run=run)
    for tokens, size in schedules.batch_size_steps(config):
        if tokens >= run.tokens:
            yield Problem("batch-size-not-reached", tokens=run.tokens, size=size, start=tokens)
    if schedule.curriculum_seqlen is not None:
        _, end, steps = schedule.curriculum_seqlen
        longest = config.model.seq_length
        iterations = run.iterations
        if steps > iterations:
            last = schedules.seq_length_at(config, iterations - 1)
            yield Problem("curriculum-not-completed", settings=schedule, run=run, last=last)
        if end < longest:
            lost = longest - end
            yield Problem("curriculum-below-sequence", settings=schedule, all=longest, lost=lost)


def _is_countable(config: Config, dp_size: int) -> bool:
    """Whether the batches of the run can be counted; if not, `Config.problems` reports why."""
    schedule = config.schedule
    lengths = (schedule.train_iters, schedule.train_samples, schedule.train_tokens)
    known = [length for length in lengths if length is not None]
    sizes = (schedule.micro_batch_size, config.model.seq_length, schedule.curriculum_seqlen_step)
    final = config.final_global_batch_size(dp_size)
    if not known or min(*known, *sizes, dp_size, final) <= 0:
        return False
    if schedule.step_batch_size_schedule is not None:
        starts = [start for start, _ in schedule.batch_size_steps]
        if not starts or starts[0] != 0 or starts != sorted(starts):
            return False
    if schedule.curriculum_seqlen is not None:
        first, last, steps = schedule.curriculum_seqlen
        if min(first, steps) <= 0 or first > last or first % schedule.curriculum_seqlen_step:
            return False
    if schedule.rampup_batch_size is None:
        return True
    start, increment, samples = schedule.rampup_batch_size
    return min(start, increment) > 0 and samples >= 0 and start <= final


def _decoupled_lr_problems(config: Config) -> Iterator[Problem]:
    """Bounds of the learning rate that exceed --decoupled-lr."""
    schedule = in_effect(config.schedule)
    options = in_effect(config.optimizer)
    if options.decoupled_lr is None:
        return
    floor = "min_lr" if options.decoupled_min_lr is None else "decoupled_min_lr"
    for owner, name in (
        (schedule, "lr_warmup_init"),
        (schedule if floor == "min_lr" else options, floor),
    ):
        if getattr(owner, name) > options.decoupled_lr:
            names = (name, "decoupled_lr")
            peak = with_value(options, "decoupled_lr")
            yield Problem("learning-rate-exceeds-decoupled", *names, settings=owner, peak=peak)


def _lr_length_problems(config: Config, dp_size: int) -> Iterator[Problem]:
    """Check warmup, decay and annealing against each other.

    They are compared in the unit in which all are given, otherwise in the learning rate's.
    """
    schedule = config.schedule
    decay = schedules.decay_as_given(config)
    warmup = schedules.given_length(config, "lr_warmup")
    annealing = (
        schedules.given_length(config, "lr_wsd_decay") if schedule.lr_decay_style == "WSD" else None
    )
    fraction = schedule.lr_warmup_fraction
    if decay is None or decay.value <= 0 or not 0.0 <= (fraction or 0.0) <= 1.0:
        return
    known = [length for length in (decay, warmup, annealing) if length is not None]
    unit = decay.unit
    if any(length.unit != unit for length in known):
        unit = schedules.lr_unit(config)
        if not _is_countable(config, dp_size):
            return

    def in_unit(length: ScheduleLength) -> float:
        return length.value if length.unit == unit else in_lr_units(config, length, dp_size)

    def described(length: ScheduleLength) -> str:
        return str(length) if length.unit == unit else f"{length} ({in_unit(length):.15g} {unit})"

    end = in_unit(decay)
    name = "lr_warmup_fraction"
    start = 0.0
    shown = ""
    if fraction is not None:
        start = fraction * end
        shown = f"{with_value(schedule, name)} x {end:.15g} = {start:.15g} {unit}"
    elif warmup is not None:
        name = warmup.field
        start = in_unit(warmup)
        shown = described(warmup)
    if start >= end and not (schedule.lr_decay_style in ENDLESS_STYLES and fraction is None):
        yield Problem(
            "warmup-not-shorter-than-decay",
            name,
            decay.field,
            shown=shown,
            described=described(decay),
            end=end - 1,
            unit=unit,
        )
    elif annealing and in_unit(annealing) > end - start:
        yield Problem(
            "annealing-exceeds-decay",
            annealing.field,
            decay.field,
            annealing=annealing,
            described=described(decay),
            start=start,
            end=end - start,
        )
