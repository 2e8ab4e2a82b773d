"""Batch size, sequence length, learning rate and weight decay: pure functions of configuration and
counters.

Nothing here is remembered, so nothing is checkpointed: a resumed run computes what the first run
would have. A length given in iterations becomes samples by the global batch size, as Megatron does
it. There are two clocks, in samples and in tokens each: batch size and the end of the run follow
what was consumed, learning rate and weight decay what was applied, so that a skipped step moves the
data forward and the learning rate not. The sequence length follows the iterations. This file knows
no torch.

Source of the formulas: Megatron-LM's optimizer_param_scheduler and num_microbatches_calculator;
Megatron-DeepSpeed's for tokens; DeepSpeed's curriculum_scheduler (fixed_linear).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ds.config import SCHEDULE_LENGTHS, SCHEDULE_UNITS, Config, flag_of
from megatron_ds.train_state import StepPlan, TrainState

INITIAL_STATE = TrainState()


def plan(config: Config, state: TrainState, dp_size: int) -> StepPlan:
    """What the step after `state` is to do.

    The learning rate is that of the samples applied before the step, so a first step under warm-up
    takes --lr-warmup-init (Megatron's scheduler moves after the optimizer).
    """
    global_batch_size = batch_size_at(
        config, state.consumed_samples, state.consumed_tokens, dp_size
    )
    micro_batch_size = config.schedule.micro_batch_size
    assert micro_batch_size is not None
    return StepPlan(
        iteration=state.iteration + 1,
        global_batch_size=global_batch_size,
        num_micro_batches=global_batch_size // (micro_batch_size * dp_size),
        lr=learning_rate(config, state, dp_size),
        weight_decay=weight_decay(config, state, dp_size),
        seq_length=seq_length_at(config, state.iteration),
    )


def batch_size_at(config: Config, samples: int, tokens: int, dp_size: int) -> int:
    """Samples of the step that starts after so many consumed samples and tokens.

    --rampup-batch-size START INCREMENT SAMPLES climbs from START to the global batch size in
    n = (global - START) / INCREMENT increments, one after each SAMPLES / n samples.
    --step-batch-size-schedule takes the last entry whose tokens are consumed.
    """
    steps = batch_size_steps(config)
    if steps:
        return next(size for start, size in reversed(steps) if start <= tokens)
    final = config.final_global_batch_size(dp_size)
    levels, end = _rampup(config, dp_size)
    if samples >= end:
        return final
    _, increment, _ = config.schedule.rampup_batch_size or (0, 0, 0)
    return final - increment * (levels - samples * levels // end)


def batch_size_steps(config: Config) -> list[tuple[int, int]]:
    """--step-batch-size-schedule: (consumed tokens, global batch size from them on).

    As in Megatron, an entry's tokens are rounded down to samples of the full length.
    """
    length = config.model.seq_length or 1
    return [(tokens // length * length, size) for tokens, size in config.schedule.batch_size_steps]


def seq_length_at(config: Config, iteration: int) -> int:
    """Tokens of each sample in the step after `iteration` steps.

    --curriculum-seqlen START END STEPS: step k, counted from 1, takes
    START + (END - START) x k / STEPS, rounded down to a multiple of --curriculum-seqlen-step, and
    END from k = STEPS on. In whole numbers: DeepSpeed's floating-point numbers make it one step of
    growth shorter at one iteration in some million.
    """
    if config.schedule.curriculum_seqlen is None:
        return config.model.sequence
    start, end, steps = config.schedule.curriculum_seqlen
    if iteration + 1 >= steps:
        return end
    length = start + (end - start) * (iteration + 1) // steps
    return length - length % config.schedule.curriculum_seqlen_step


def total_iterations(config: Config, dp_size: int, state: TrainState = INITIAL_STATE) -> int:
    """Steps of the whole run, of which `state` has done the first.

    --train-iters, or the full batches that fit into --train-samples, or the steps that start before
    --train-tokens are consumed; the fewest where several are given. What a resumed run has consumed
    need not be what these settings would have: its schedules may have been others.
    """
    schedule = config.schedule
    if schedule.train_iters is not None and schedule.train_tokens is None:
        return schedule.train_iters
    return _totals(config, dp_size, state).iterations


class RunTotals(NamedTuple):
    """What a run comes to if it goes to its end."""

    iterations: int
    samples: int
    tokens: int


class ConstantSegment(NamedTuple):
    """Steps in a row that are equal."""

    steps: int
    batch_size: int
    seq_length: int


def constant_segments(
    config: Config, dp_size: int, state: TrainState = INITIAL_STATE
) -> Iterator[ConstantSegment]:
    """What comes after `state`, to the end of the run; as many stretches as its batch size and
    sequence length have changes."""
    schedule = config.schedule
    iteration, samples, tokens = state.iteration, state.consumed_samples, state.consumed_tokens
    while True:
        batch_size = batch_size_at(config, samples, tokens, dp_size)
        length = seq_length_at(config, iteration)
        limits = [
            *_steps_of_batch(config, samples, tokens, dp_size, batch_size * length),
            *_steps_of_length(config, iteration),
        ]
        if schedule.train_iters is not None:
            limits.append(schedule.train_iters - iteration)
        if schedule.train_samples is not None:
            # A last batch that would pass the end is not taken.
            limits.append((schedule.train_samples - samples) // batch_size)
        if schedule.train_tokens is not None:
            limits.append(_ceil_div(schedule.train_tokens - tokens, batch_size * length))
        steps = min(limits)
        if steps <= 0:
            return
        yield ConstantSegment(steps, batch_size, length)
        iteration += steps
        samples += steps * batch_size
        tokens += steps * batch_size * length


def _steps_of_batch(
    config: Config, samples: int, tokens: int, dp_size: int, step_tokens: int
) -> Iterator[int]:
    """Steps until the batch size may change, if it will."""
    upcoming = [start for start, _ in batch_size_steps(config) if start > tokens]
    if upcoming:
        yield _ceil_div(upcoming[0] - tokens, step_tokens)
    levels, end = _rampup(config, dp_size)
    if not config.schedule.batch_size_steps and samples < end:
        level_end = _ceil_div((samples * levels // end + 1) * end, levels)
        yield _ceil_div(level_end - samples, batch_size_at(config, samples, tokens, dp_size))


def _steps_of_length(config: Config, iteration: int) -> Iterator[int]:
    """Steps until the sequence length changes, if it will."""
    start, end, steps = config.schedule.curriculum_seqlen or (0, 0, 0)
    if start == end or iteration + 1 >= steps:
        return
    wanted = seq_length_at(config, iteration) + config.schedule.curriculum_seqlen_step
    yield min(steps, _ceil_div((wanted - start) * steps, end - start)) - (iteration + 1)


def describe_schedules(config: Config) -> list[tuple[str, str]]:
    """What changes with the tokens and the steps, in words: a name and its course."""
    lines, steps = [], batch_size_steps(config)
    if steps:
        sizes = ", ".join(f"{size} from {start:,} tokens on" for start, size in steps)
        lines.append(("batch sizes", sizes))
    if config.schedule.curriculum_seqlen is not None:
        start, end, length = config.schedule.curriculum_seqlen
        unit = config.schedule.curriculum_seqlen_step
        course = f"{start} -> {end} over {length:,} iterations, in multiples of {unit}"
        lines.append(("sequence length", course))
    return lines


def _totals(config: Config, dp_size: int, state: TrainState = INITIAL_STATE) -> RunTotals:
    total = RunTotals(state.iteration, state.consumed_samples, state.consumed_tokens)
    for steps, batch_size, length in constant_segments(config, dp_size, state):
        samples = steps * batch_size
        total = RunTotals(
            total.iterations + steps, total.samples + samples, total.tokens + samples * length
        )
    return total


def _ceil_div(value: int, unit: int) -> int:
    """The quotient, rounded up."""
    return -(-value // unit)


def planned_samples(
    config: Config, dp_size: int, state: TrainState = INITIAL_STATE
) -> tuple[int, int, int]:
    """Samples of the training, validation and test sets that the run asks for, those before `state`
    among them.

    Every evaluation reads the same first --eval-iters full global batches, so that the losses of
    one run compare.
    """
    evaluation = config.logging.eval_iters * config.final_global_batch_size(dp_size)
    train = _samples(config, dp_size)
    if train is None:
        train = _totals(config, dp_size, state).samples
    return train, evaluation, evaluation


def planned_tokens(config: Config, dp_size: int, state: TrainState = INITIAL_STATE) -> int:
    """Tokens that the whole run trains on, those before `state` among them."""
    return _totals(config, dp_size, state).tokens


def learning_rate(config: Config, state: TrainState, dp_size: int) -> float:
    """Learning rate of the step after `state`."""
    peak, floor = config.optimizer.lr, config.schedule.min_lr
    assert peak is not None
    done = state.applied_tokens if lr_unit(config) == "tokens" else state.applied_samples
    warmup, decay = _warmup(config, dp_size), _decay(config, dp_size)
    if warmup > 0 and done <= warmup:
        start = config.schedule.lr_warmup_init
        return start + (peak - start) * done / warmup
    style = config.schedule.lr_decay_style
    if style == "constant":
        return peak
    if done > decay:
        return floor
    if style == "inverse-square-root":
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(done, 1)))
    if style == "WSD":
        annealing = _wsd_decay(config, dp_size)
        past = max(0, done - (decay - annealing))
        share = _wsd_share(config.schedule.lr_wsd_decay_style, past / annealing)
    else:
        progress = (done - warmup) / (decay - warmup)
        share = 1.0 - progress if style == "linear" else _half_cosine(progress)
    return floor + share * (peak - floor)


def warmup_and_decay(config: Config, dp_size: int) -> tuple[float, float]:
    """The warm-up, and the decay with the warm-up before it, in the unit of `rate_unit`."""
    return _warmup(config, dp_size), _decay(config, dp_size)


def lr_unit(config: Config) -> str:
    """The clock of the learning rate: "tokens" if a length of its course is given in tokens, or if
    only the run's is and it ends the decay; "samples" otherwise.
    """
    schedule = config.schedule
    if schedule.lr_decay_tokens or schedule.lr_warmup_tokens or schedule.lr_wsd_decay_tokens:
        return "tokens"
    ends = (*schedule.given_lengths("lr_decay"), schedule.train_iters, schedule.train_samples)
    return "samples" if any(ends) else "tokens"


def weight_decay(config: Config, state: TrainState, dp_size: int) -> float:
    """Weight decay of the step after `state`; it moves over the whole run, on the same clock."""
    optimizer = config.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        return optimizer.weight_decay
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    assert start is not None
    assert end is not None
    samples = _samples(config, dp_size)
    if samples is None:
        assert config.schedule.train_tokens is not None
        progress = min(1.0, state.applied_tokens / config.schedule.train_tokens)
    else:
        progress = min(1.0, state.applied_samples / samples)
    linear = optimizer.weight_decay_incr_style == "linear"
    return start + (progress if linear else 1.0 - _half_cosine(progress)) * (end - start)


def problems(config: Config, dp_size: int) -> Iterator[str]:
    """Schedules that cannot be, a line each in the user's words.

    It comes beside `Config.problems()`: what that says about batch sizes and lengths is not
    repeated here.
    """
    schedule, optimizer = config.schedule, config.optimizer
    for stem in ("lr_decay", "lr_wsd_decay"):
        for name in (f"{stem}_{unit}" for unit in SCHEDULE_UNITS):
            value = getattr(schedule, name)
            if value is not None and value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
    for name in (*(f"lr_warmup_{unit}" for unit in SCHEDULE_UNITS), "lr_warmup_init", "min_lr"):
        if (getattr(schedule, name) or 0) < 0:
            yield f"{flag_of(name)} {getattr(schedule, name)}: must not be negative"
    for name in ("weight_decay", "start_weight_decay", "end_weight_decay"):
        value = getattr(optimizer, name)
        if value is not None and value < 0:
            yield f"{flag_of(name)} {value}: must not be negative"
    for name in ("lr_warmup_init", "min_lr"):
        value = getattr(schedule, name)
        if optimizer.lr is not None and value > optimizer.lr:
            yield f"{flag_of(name)} {value} is above --lr {optimizer.lr}"
    yield from _length_problems(config, dp_size)
    yield from _curriculum_problems(config)
    if _is_countable(config, dp_size) and total_iterations(config, dp_size) == 0:
        first = batch_size_at(config, 0, 0, dp_size)
        yield (
            f"--train-samples {schedule.train_samples} is less than the first batch of {first} "
            f"samples: give at least {first}"
        )


def _curriculum_problems(config: Config) -> Iterator[str]:
    """The sequence length's course against the model's length and the memory's layout."""
    if config.schedule.curriculum_seqlen is None:
        return
    given = f"--curriculum-seqlen {' '.join(map(str, config.schedule.curriculum_seqlen))}"
    end, longest = config.schedule.curriculum_seqlen[1], config.model.seq_length
    if longest is not None and end > longest:
        yield f"{given}: its last length {end} is above --seq-length {longest}"
    if config.recompute.contigious_checkpointing:
        yield (
            f"{given} and --contigious-checkpointing exclude each other: the buffer is laid out "
            "for inputs of one length"
        )


def warnings(config: Config, dp_size: int) -> Iterator[str]:
    """What a sound schedule does that its user may not expect, a line each."""
    if not _is_countable(config, dp_size):
        return
    schedule, run = config.schedule, _totals(config, dp_size)
    by_tokens = schedule.train_tokens is not None and run.tokens >= schedule.train_tokens
    samples = schedule.train_samples
    if samples is not None and run.samples < samples and not by_tokens:
        yield (
            f"--train-samples {samples} ends within a batch: the run's {run.iterations} iterations "
            f"take {run.samples} samples, the last {samples - run.samples} are too few for a batch"
        )
    if schedule.train_tokens is not None and not by_tokens:
        unit = "iters" if samples is None else "samples"
        yield (
            f"--train-tokens {schedule.train_tokens} is not reached: --train-{unit} "
            f"{getattr(schedule, f'train_{unit}')} ends the run after {run.tokens:,} tokens"
        )
    for tokens, size in batch_size_steps(config):
        if tokens >= run.tokens:
            yield (
                f"--step-batch-size-schedule: the run ends after {run.tokens:,} tokens, before the "
                f"batch of {size} begins at {tokens:,}"
            )
    if schedule.curriculum_seqlen is not None:
        yield from _curriculum_remarks(config, run.iterations)


def _curriculum_remarks(config: Config, iterations: int) -> Iterator[str]:
    start, end, steps = config.schedule.curriculum_seqlen or (0, 0, 0)
    given, longest = f"--curriculum-seqlen {start} {end} {steps}", config.model.sequence
    if steps > iterations:
        yield (
            f"{given}: the run ends after {iterations} iterations, at a length of "
            f"{seq_length_at(config, iterations - 1)}"
        )
    if end < longest:
        yield (
            f"{given} ends below --seq-length {longest}: the last {longest - end} tokens of each "
            "sample are never trained on"
        )


def _is_countable(config: Config, dp_size: int) -> bool:
    """Whether the batches of the run can be counted; if not, Config.problems() says why."""
    schedule = config.schedule
    lengths = (schedule.train_iters, schedule.train_samples, schedule.train_tokens)
    given = [length for length in lengths if length is not None]
    sizes = (schedule.micro_batch_size or 0, config.model.seq_length or 0, dp_size)
    if not given or min(*given, *sizes, schedule.curriculum_seqlen_step) <= 0:
        return False
    if config.final_global_batch_size(dp_size) <= 0:
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
    return (
        min(start, increment) > 0
        and samples >= 0
        and start <= config.final_global_batch_size(dp_size)
    )


@dataclass(frozen=True)
class ScheduleLength:
    """A length as it was given."""

    flag: str
    value: int
    unit: str

    def __str__(self) -> str:
        return f"{self.flag} {self.value}"


def _given(config: Config, stem: str) -> ScheduleLength | None:
    """The length `<stem>_<unit>`; Config.problems() sees to it that there is one at most."""
    for name in config.schedule.given_lengths(stem):
        return ScheduleLength(
            flag_of(name), getattr(config.schedule, name), name.rpartition("_")[2]
        )
    return None


def _decay_given(config: Config) -> ScheduleLength | None:
    """What ends the decay: its own length or the run's, in the clock's unit if it has that."""
    given = _given(config, "lr_decay")
    if given is not None:
        return given
    schedule = config.schedule
    if lr_unit(config) == "tokens" and schedule.train_tokens is not None:
        return ScheduleLength("--train-tokens", schedule.train_tokens, "tokens")
    return _given(config, "train")


def _length_problems(config: Config, dp_size: int) -> Iterator[str]:
    """Warm-up, decay and annealing against each other, in the unit in which they were given, or in
    the learning rate's if they were given in several.
    """
    schedule = config.schedule
    if schedule.train_iters is not None and schedule.train_samples is not None:
        return
    if any(len(schedule.given_lengths(stem)) > 1 for stem in SCHEDULE_LENGTHS):
        return
    decay, warmup, annealing = (
        _decay_given(config),
        _given(config, "lr_warmup"),
        _given(config, "lr_wsd_decay"),
    )
    given = [length for length in (decay, warmup, annealing) if length is not None]
    fraction = schedule.lr_warmup_fraction
    if decay is None or decay.value <= 0 or not 0.0 <= (fraction or 0.0) <= 1.0:
        return
    unit = decay.unit
    if any(length.unit != unit for length in given):
        unit = lr_unit(config)
        odd = [length for length in given if length.unit != unit]
        if unit == "tokens" and schedule.curriculum_seqlen is not None:
            yield from (_without_tokens(length) for length in odd)
            return
        if not _is_countable(config, dp_size):
            return

    def measured(length: ScheduleLength | None) -> float:
        if length is None:
            return 0
        return length.value if length.unit == unit else _in_lr_units(config, length, dp_size)

    end, part = measured(decay), measured(annealing)
    start = measured(warmup) if fraction is None else fraction * end
    ended = str(decay) if decay.unit == unit else f"{decay} ({end:.15g} {unit})"
    if start >= end:
        said = str(warmup)
        if fraction is not None:
            said = f"--lr-warmup-fraction {fraction} x {end:.15g} = {start:.15g} {unit}"
        elif warmup is not None and warmup.unit != unit:
            said = f"{warmup} ({start:.15g} {unit})"
        yield (
            f"{said}: the learning rate's warm-up must be shorter than its decay, {ended} "
            f"(give at most {end - 1:.15g} {unit}, or a greater --lr-decay-{unit})"
        )
    elif schedule.lr_decay_style == "WSD" and part > end - start:
        yield (
            f"{annealing} is longer than what {ended} leaves "
            f"after a warm-up of {start:.15g}: give at most {end - start:.15g}"
        )


def _without_tokens(length: ScheduleLength) -> str:
    """Why a length cannot be told in tokens under a curriculum."""
    stem, _, unit = length.flag.rpartition("-")
    wanted = f"{stem}-tokens"
    if stem == "--train":
        wanted = "--lr-decay-tokens"
        words = f"{length} would end the learning rate's decay"
    else:
        words = f"{length} counts {'steps' if unit == 'iters' else 'samples'}"
    return (
        f"{words}, but the learning rate follows tokens, of which --curriculum-seqlen gives each "
        f"sample another number: give {wanted}"
    )


def _in_lr_units(config: Config, length: ScheduleLength, dp_size: int) -> int:
    """A length of the learning rate's course in the unit of `rate_unit`."""
    if length.unit == lr_unit(config):
        return length.value
    samples = length.value * (
        config.final_global_batch_size(dp_size) if length.unit == "iters" else 1
    )
    if lr_unit(config) == "samples":
        return samples
    # A length in tokens moves the clock to tokens; under a curriculum problems() wants all so.
    return samples * config.model.sequence


def _samples(config: Config, dp_size: int) -> int | None:
    """Samples of the whole run as they were given; None if only its tokens were."""
    schedule = config.schedule
    if schedule.train_iters is not None:
        return schedule.train_iters * config.final_global_batch_size(dp_size)
    return schedule.train_samples


def _decay(config: Config, dp_size: int) -> int:
    """The decay, warm-up included, after which the learning rate stays at its floor."""
    given = _decay_given(config)
    assert given is not None
    return _in_lr_units(config, given, dp_size)


def _warmup(config: Config, dp_size: int) -> float:
    """The warm-up; a fraction's need not be whole."""
    if config.schedule.lr_warmup_fraction is not None:
        return config.schedule.lr_warmup_fraction * _decay(config, dp_size)
    given = _given(config, "lr_warmup")
    return 0 if given is None else _in_lr_units(config, given, dp_size)


def _wsd_decay(config: Config, dp_size: int) -> int:
    """WSD's annealing, the end of the decay."""
    given = _given(config, "lr_wsd_decay")
    assert given is not None
    return _in_lr_units(config, given, dp_size)


def _rampup(config: Config, dp_size: int) -> tuple[int, int]:
    """Increments of the ramp-up and samples over which they are spread; (0, 0) without one."""
    if config.schedule.rampup_batch_size is None:
        return 0, 0
    start, increment, samples = config.schedule.rampup_batch_size
    levels = (config.final_global_batch_size(dp_size) - start) // increment
    return (levels, samples) if levels else (0, 0)


def _half_cosine(progress: float) -> float:
    """From 1 to 0 along half a cosine."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _wsd_share(style: str, progress: float) -> float:
    """Share of the peak above the floor at `progress` of the annealing, from 1 to 0."""
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return _half_cosine(progress)
    if style == "exponential":
        return 2.0 * math.pow(0.5, progress) - 1.0
    return 1.0 - math.sqrt(progress)
