"""Batch size, learning rate and weight decay: pure functions of configuration and counters.

Nothing here is remembered, so nothing is checkpointed: a resumed run computes what the first run
would have. All schedules count samples; a length given in iterations becomes samples by the global
batch size, as Megatron does it. There are two clocks: the batch size follows the consumed samples,
learning rate and weight decay follow the applied ones, so that a skipped step moves the data
forward and the learning rate not. This file knows no torch.

Source of the formulas: Megatron-LM's optimizer_param_scheduler and num_microbatches_calculator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_ds.config import Config, flag_of
from megatron_ds.state import StepPlan, TrainState


def plan(config: Config, state: TrainState, dp_size: int) -> StepPlan:
    """What the step after `state` is to do.

    The learning rate is that of the samples applied before the step, so a first step under warm-up
    takes --lr-warmup-init (Megatron's scheduler moves after the optimizer).
    """
    global_batch_size = batch_size_at(config, state.consumed_samples, dp_size)
    micro_batch_size = config.schedule.micro_batch_size
    assert micro_batch_size is not None
    return StepPlan(
        iteration=state.iteration + 1,
        global_batch_size=global_batch_size,
        num_micro_batches=global_batch_size // (micro_batch_size * dp_size),
        lr=learning_rate(config, state, dp_size),
        weight_decay=weight_decay(config, state, dp_size),
    )


def batch_size_at(config: Config, consumed_samples: int, dp_size: int) -> int:
    """Samples of the step that starts after `consumed_samples`.

    --rampup-batch-size START INCREMENT SAMPLES climbs from START to the global batch size in
    n = (global - START) / INCREMENT increments, one after each SAMPLES / n samples.
    """
    final = config.batch_size(dp_size)
    levels, samples = _rampup(config, dp_size)
    if consumed_samples >= samples:
        return final
    _, increment, _ = config.schedule.rampup_batch_size or (0, 0, 0)
    return final - increment * (levels - consumed_samples * levels // samples)


def total_iterations(config: Config, dp_size: int) -> int:
    """Steps of the whole run: --train-iters, or the full batches that fit into --train-samples."""
    if config.schedule.train_iters is not None:
        return config.schedule.train_iters
    return _walk(config, dp_size)[0]


def _walk(config: Config, dp_size: int) -> tuple[int, int]:
    """Steps of a run of --train-samples, and the samples that they take.

    The ramp-up is walked level by level. A last batch that would pass --train-samples is not taken.
    """
    end = _length(config, dp_size)
    levels, samples = _rampup(config, dp_size)
    iterations = consumed = 0
    while consumed < samples:
        batch_size = batch_size_at(config, consumed, dp_size)
        level = consumed * levels // samples
        level_end = -(-(level + 1) * samples // levels)
        steps = -(-(level_end - consumed) // batch_size)
        if consumed + steps * batch_size > end:
            steps = (end - consumed) // batch_size
            return iterations + steps, consumed + steps * batch_size
        iterations += steps
        consumed += steps * batch_size
    steps = max(0, end - consumed) // config.batch_size(dp_size)
    return iterations + steps, consumed + steps * config.batch_size(dp_size)


def planned_samples(config: Config, dp_size: int) -> tuple[int, int, int]:
    """Samples of the training, validation and test sets that the run asks for.

    Every evaluation reads the same first --eval-iters full global batches, so that the losses of
    one run compare.
    """
    evaluation = config.logging.eval_iters * config.batch_size(dp_size)
    return _length(config, dp_size), evaluation, evaluation


def learning_rate(config: Config, state: TrainState, dp_size: int) -> float:
    """Learning rate of the step after `state`."""
    peak, floor = config.optimizer.lr, config.schedule.min_lr
    assert peak is not None
    done = state.applied_samples
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
    """Samples of the warm-up, and samples until the decay ends, the warm-up among them."""
    return _warmup(config, dp_size), _decay(config, dp_size)


def weight_decay(config: Config, state: TrainState, dp_size: int) -> float:
    """Weight decay of the step after `state`; it moves over the whole run, on the same clock."""
    optimizer = config.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        return optimizer.weight_decay
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    assert start is not None
    assert end is not None
    progress = min(1.0, state.applied_samples / _length(config, dp_size))
    linear = optimizer.weight_decay_incr_style == "linear"
    return start + (progress if linear else 1.0 - _half_cosine(progress)) * (end - start)


def problems(config: Config, dp_size: int) -> Iterator[str]:
    """Schedules that cannot be, a line each in the user's words.

    It comes beside `Config.problems()`: what that says about batch sizes and lengths is not
    repeated here.
    """
    schedule, optimizer = config.schedule, config.optimizer
    for stem in ("lr_decay", "lr_wsd_decay"):
        for name in (f"{stem}_iters", f"{stem}_samples"):
            value = getattr(schedule, name)
            if value is not None and value <= 0:
                yield f"{flag_of(name)} {value}: must be positive"
    for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init", "min_lr"):
        if getattr(schedule, name) < 0:
            yield f"{flag_of(name)} {getattr(schedule, name)}: must not be negative"
    for name in ("weight_decay", "start_weight_decay", "end_weight_decay"):
        value = getattr(optimizer, name)
        if value is not None and value < 0:
            yield f"{flag_of(name)} {value}: must not be negative"
    for name in ("lr_warmup_init", "min_lr"):
        value = getattr(schedule, name)
        if optimizer.lr is not None and value > optimizer.lr:
            yield f"{flag_of(name)} {value} is above --lr {optimizer.lr}"
    yield from _length_problems(config)
    if _walkable(config, dp_size) and total_iterations(config, dp_size) == 0:
        first = batch_size_at(config, 0, dp_size)
        yield (
            f"--train-samples {schedule.train_samples} is less than the first batch of {first} "
            f"samples: give at least {first}"
        )


def remarks(config: Config, dp_size: int) -> Iterator[str]:
    """What a sound schedule does that its user may not expect, a line each."""
    samples = config.schedule.train_samples
    if samples is None or not _walkable(config, dp_size):
        return
    iterations, taken = _walk(config, dp_size)
    if taken < samples:
        yield (
            f"--train-samples {samples} ends within a batch: the run's {iterations} iterations "
            f"take {taken} samples, the last {samples - taken} are too few for a batch"
        )


def _walkable(config: Config, dp_size: int) -> bool:
    """Whether the batches of the run can be counted; if not, Config.problems() says why."""
    schedule = config.schedule
    length = schedule.train_iters or schedule.train_samples or 0
    if min(length, schedule.micro_batch_size or 0, dp_size) <= 0 or config.batch_size(dp_size) <= 0:
        return False
    if schedule.rampup_batch_size is None:
        return True
    start, increment, samples = schedule.rampup_batch_size
    return min(start, increment) > 0 and samples >= 0 and start <= config.batch_size(dp_size)


def _length_problems(config: Config) -> Iterator[str]:
    """Warm-up, decay and annealing against each other, in the unit in which they were given."""
    schedule = config.schedule
    if (schedule.train_iters is None) == (schedule.train_samples is None):
        return
    unit = _unit(config)
    decay_flag, decay = f"--lr-decay-{unit}", getattr(schedule, f"lr_decay_{unit}")
    if decay is None:
        decay_flag, decay = f"--train-{unit}", getattr(schedule, f"train_{unit}")
    fraction = schedule.lr_warmup_fraction
    if decay <= 0 or not 0.0 <= (fraction or 0.0) <= 1.0:
        return
    warmup = getattr(schedule, f"lr_warmup_{unit}") if fraction is None else fraction * decay
    annealing = getattr(schedule, f"lr_wsd_decay_{unit}")
    if warmup >= decay:
        given = (
            f"--lr-warmup-{unit} {warmup}"
            if fraction is None
            else f"--lr-warmup-fraction {fraction} x {decay} = {warmup:.12g} {unit}"
        )
        yield (
            f"{given}: the learning rate's warm-up must be shorter than its decay, {decay_flag} "
            f"{decay} (give at most {decay - 1} {unit}, or a greater --lr-decay-{unit})"
        )
    elif schedule.lr_decay_style == "WSD" and annealing is not None and annealing > decay - warmup:
        yield (
            f"--lr-wsd-decay-{unit} {annealing} is longer than what {decay_flag} {decay} leaves "
            f"after a warm-up of {warmup:.12g}: give at most {decay - warmup:.12g}"
        )


def _unit(config: Config) -> str:
    return "iters" if config.schedule.train_iters is not None else "samples"


def _in_samples(config: Config, stem: str, dp_size: int) -> int | None:
    """The length `<stem>_iters` or `<stem>_samples` in samples, by the unit of the run's length."""
    value: int | None = getattr(config.schedule, f"{stem}_{_unit(config)}")
    if value is None or _unit(config) == "samples":
        return value
    return value * config.batch_size(dp_size)


def _length(config: Config, dp_size: int) -> int:
    """Samples of the whole run."""
    length = _in_samples(config, "train", dp_size)
    assert length is not None
    return length


def _decay(config: Config, dp_size: int) -> int:
    """Samples, warm-up included, after which the learning rate stays at its floor."""
    return _in_samples(config, "lr_decay", dp_size) or _length(config, dp_size)


def _warmup(config: Config, dp_size: int) -> float:
    """Samples of warm-up; a fraction's need not be whole."""
    if config.schedule.lr_warmup_fraction is not None:
        return config.schedule.lr_warmup_fraction * _decay(config, dp_size)
    return _in_samples(config, "lr_warmup", dp_size) or 0


def _wsd_decay(config: Config, dp_size: int) -> int:
    """Samples of WSD's annealing, the end of the decay."""
    annealing = _in_samples(config, "lr_wsd_decay", dp_size)
    assert annealing is not None
    return annealing


def _rampup(config: Config, dp_size: int) -> tuple[int, int]:
    """Increments of the ramp-up and samples over which they are spread; (0, 0) without one."""
    if config.schedule.rampup_batch_size is None:
        return 0, 0
    start, increment, samples = config.schedule.rampup_batch_size
    levels = (config.batch_size(dp_size) - start) // increment
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
