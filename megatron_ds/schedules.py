"""Batch size, sequence length, learning rate and weight decay as pure functions of configuration
and counters.

Schedules have no state and are not checkpointed: a resumed run computes the values that the first
run would have. Batch size and end of run follow the consumed samples and tokens; learning rate and
weight decay follow the applied ones, so a skipped step advances the data but not the learning rate.
The sequence length follows the iterations. Knows no torch.

The lengths of the learning rate schedule may be given in iterations, samples or tokens. Iterations
become samples by the final global batch size, as in Megatron.

Sources of the formulas: Megatron-LM's optimizer_param_scheduler and num_microbatches_calculator;
Megatron-DeepSpeed's for tokens; DeepSpeed's curriculum_scheduler (fixed_linear) and lr_schedules
(logarithmic warmup and a cosine).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatron_ds.config import Config
from megatron_ds.config.problems import option
from megatron_ds.dataclass import dataclass
from megatron_ds.spike_limits import spike_limits
from megatron_ds.train_state import StepPlan, TrainState

INITIAL_STATE = TrainState()


def plan(config: Config, state: TrainState, dp_size: int) -> StepPlan:
    """Plan the step after `state`.

    The learning rate depends on what was applied before the step, so the first step of a warmup
    uses --lr-warmup-init (Megatron's scheduler steps after the optimizer).
    """
    global_batch_size = batch_size_at(
        config, state.consumed_samples, state.consumed_tokens, dp_size
    )
    return StepPlan(
        iteration=state.iteration + 1,
        global_batch_size=global_batch_size,
        num_micro_batches=global_batch_size // (config.schedule.micro_batch_size * dp_size),
        lr=learning_rate(config, state, dp_size),
        decoupled_lr=decoupled_learning_rate(config, state, dp_size),
        weight_decay=weight_decay(config, state, dp_size),
        seq_length=seq_length_at(config, state.iteration),
        limits=spike_limits(config, state),
    )


def skipped_range(config: Config, iteration: int) -> tuple[int, int] | None:
    """The range of --skip-train-iteration-range that contains an iteration."""
    ranges = config.schedule.skipped_ranges
    return next((one for one in ranges if one[0] <= iteration <= one[1]), None)


def batch_size_at(config: Config, samples: int, tokens: int, dp_size: int) -> int:
    """Global batch size of the step that starts at the given consumed samples and tokens.

    --rampup-batch-size START INCREMENT SAMPLES increases it from START to the global batch size in
    n = (global - START) / INCREMENT increments, one every SAMPLES / n samples.
    --step-batch-size-schedule uses the last entry whose tokens are consumed.
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
    """--step-batch-size-schedule as (first token, global batch size from there).

    As in Megatron, tokens are rounded down to samples of the full sequence length.
    """
    length = config.model.seq_length or 1  # also called before the options are validated
    return [(tokens // length * length, size) for tokens, size in config.schedule.batch_size_steps]


def seq_length_at(config: Config, iteration: int) -> int:
    """Sequence length of the step after `iteration` steps.

    --curriculum-seqlen START END STEPS: step k, counted from 1, has length
    START + (END - START) x k / STEPS, rounded down to a multiple of --curriculum-seqlen-step; END
    from k = STEPS. Integer arithmetic avoids the rounding error of DeepSpeed's floating-point
    formula, which is one multiple too short at about one iteration in a million.
    """
    if config.schedule.curriculum_seqlen is None:
        return config.model.seq_length
    start, end, steps = config.schedule.curriculum_seqlen
    if iteration + 1 >= steps:
        return end
    length = start + (end - start) * (iteration + 1) // steps
    return length - length % config.schedule.curriculum_seqlen_step


def total_iterations(config: Config, dp_size: int, state: TrainState = INITIAL_STATE) -> int:
    """Total steps of the run, including those already applied in `state`.

    The minimum of --train-iters, the full batches in --train-samples and the steps that start
    before --train-tokens are consumed. The result depends on `state` because a run may be resumed
    with other schedules than it started with.
    """
    schedule = config.schedule
    if schedule.train_iters is not None and schedule.train_tokens is None:
        return schedule.train_iters
    return run_totals(config, dp_size, state).iterations


class RunTotals(NamedTuple):
    """Counters at the end of a run."""

    iterations: int
    samples: int
    tokens: int


class ConstantSegment(NamedTuple):
    """Consecutive steps of equal batch size and sequence length."""

    steps: int
    batch_size: int
    seq_length: int


def constant_segments(
    config: Config, dp_size: int, state: TrainState = INITIAL_STATE
) -> Iterator[ConstantSegment]:
    """Yield the steps from `state` to the end of the run, one segment per change of batch size or
    sequence length."""
    schedule = config.schedule
    iteration = state.iteration
    samples = state.consumed_samples
    tokens = state.consumed_tokens
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
            # An incomplete last batch is dropped.
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
    """Yield the steps until the batch size may change, if it will."""
    upcoming = [start for start, _ in batch_size_steps(config) if start > tokens]
    if upcoming:
        yield _ceil_div(upcoming[0] - tokens, step_tokens)
    levels, end = _rampup(config, dp_size)
    if not config.schedule.batch_size_steps and samples < end:
        level_end = _ceil_div((samples * levels // end + 1) * end, levels)
        yield _ceil_div(level_end - samples, batch_size_at(config, samples, tokens, dp_size))


def _steps_of_length(config: Config, iteration: int) -> Iterator[int]:
    """Yield the steps until the sequence length changes, if it will."""
    start, end, steps = config.schedule.curriculum_seqlen or (0, 0, 0)
    if start == end or iteration + 1 >= steps:
        return
    following = seq_length_at(config, iteration) + config.schedule.curriculum_seqlen_step
    yield min(steps, _ceil_div((following - start) * steps, end - start)) - (iteration + 1)


def describe_schedules(config: Config) -> list[tuple[str, str]]:
    """Describe the schedules of batch size and sequence length, as (name, description)."""
    lines = []
    steps = batch_size_steps(config)
    if steps:
        sizes = ", ".join(f"{size} from {start:,} tokens" for start, size in steps)
        lines.append(("batch sizes", sizes))
    if config.schedule.curriculum_seqlen is not None:
        start, end, length = config.schedule.curriculum_seqlen
        unit = config.schedule.curriculum_seqlen_step
        description = f"{start} -> {end} over {length:,} iterations, in multiples of {unit}"
        lines.append(("sequence length", description))
    return lines


def run_totals(config: Config, dp_size: int, state: TrainState = INITIAL_STATE) -> RunTotals:
    """Counters at the end of the run, including the progress of `state`."""
    total = RunTotals(state.iteration, state.consumed_samples, state.consumed_tokens)
    for steps, batch_size, length in constant_segments(config, dp_size, state):
        samples = steps * batch_size
        total = RunTotals(
            total.iterations + steps, total.samples + samples, total.tokens + samples * length
        )
    return total


def tokens_of_steps(segments: Iterable[ConstantSegment], count: int) -> int:
    """Tokens of the first `count` steps."""
    tokens = 0
    for steps, batch_size, length in segments:
        tokens += min(steps, count) * batch_size * length
        count -= min(steps, count)
    return tokens


def _ceil_div(value: int, unit: int) -> int:
    return -(-value // unit)


def planned_samples(
    config: Config, dp_size: int, state: TrainState = INITIAL_STATE
) -> tuple[int, int, int]:
    """Samples that the run needs of the train, valid and test splits.

    The training samples include those before `state`. Every evaluation reads the same first
    --eval-iters full global batches, so that its losses are comparable within the run.
    """
    evaluation = config.evaluation.eval_iters * config.final_global_batch_size(dp_size)
    train = run_samples(config, dp_size)
    if train is None:
        train = run_totals(config, dp_size, state).samples
    return train, evaluation, evaluation


@dataclass(frozen=True)
class ScheduleLength:
    """A length of the schedule as the user gave it."""

    field: str
    value: int

    @property
    def unit(self) -> str:
        """ "iters", "samples" or "tokens"."""
        return self.field.rpartition("_")[2]

    @property
    def stem(self) -> str:
        """Field without the unit: "train", "lr_decay", "lr_warmup" or "lr_wsd_decay"."""
        return self.field.rpartition("_")[0]

    def __str__(self) -> str:
        return f"{option(self.field)} {self.value}"


def given_length(config: Config, stem: str) -> ScheduleLength | None:
    """The length `<stem>_<unit>`; `Config.problems` ensures that at most one unit is given."""
    for name in config.schedule.given_lengths(stem):
        return ScheduleLength(name, getattr(config.schedule, name))
    return None


def decay_as_given(config: Config) -> ScheduleLength | None:
    """The length that ends the decay: its own, or the run length."""
    length = given_length(config, "lr_decay")
    tokens = config.schedule.train_tokens
    if length is None and lr_unit(config) == "tokens" and tokens is not None:
        return ScheduleLength("train_tokens", tokens)
    return length or given_length(config, "train")


def lr_unit(config: Config) -> str:
    """Unit of the learning rate schedule, "tokens" or "samples".

    It is tokens if any of its lengths is given in tokens, or if only the run length is, which then
    ends the decay.
    """
    schedule = config.schedule
    if schedule.lr_decay_tokens or schedule.lr_warmup_tokens or schedule.lr_wsd_decay_tokens:
        return "tokens"
    ends = (*schedule.given_lengths("lr_decay"), schedule.train_iters, schedule.train_samples)
    return "samples" if any(ends) else "tokens"


def in_lr_units(config: Config, length: ScheduleLength, dp_size: int) -> int:
    """Convert a length to `lr_unit`."""
    if length.unit == lr_unit(config):
        return length.value
    samples = _in_samples(config, length, dp_size)
    if lr_unit(config) == "samples":
        return samples
    return tokens_of_samples(config, samples, dp_size)


def tokens_of_samples(config: Config, samples: int, dp_size: int) -> int:
    """Tokens of the first samples of the run, which with a curriculum differ in length."""
    tokens = 0
    if config.schedule.curriculum_seqlen is not None:
        for steps, batch_size, length in constant_segments(config, dp_size):
            part = min(samples, steps * batch_size)
            samples -= part
            tokens += part * length
            if not samples:
                break
    return tokens + samples * config.model.seq_length


def _in_samples(config: Config, length: ScheduleLength, dp_size: int) -> int:
    is_samples = length.unit == "samples"
    return length.value * (1 if is_samples else config.final_global_batch_size(dp_size))


def run_samples(config: Config, dp_size: int) -> int | None:
    """Samples of the run from --train-iters or --train-samples; None if only tokens are given."""
    schedule = config.schedule
    if schedule.train_iters is not None:
        return schedule.train_iters * config.final_global_batch_size(dp_size)
    return schedule.train_samples


def decay_length(config: Config, dp_size: int) -> int:
    """End of the decay in `lr_unit`, counted from the start of the run (warmup included)."""
    length = decay_as_given(config)
    assert length is not None
    return in_lr_units(config, length, dp_size)


def warmup_length(config: Config, dp_size: int) -> float:
    """Warmup in `lr_unit`; not an integer in general if given as a fraction.

    A logarithmic one has at least two steps, as in DeepSpeed.
    """
    warmup = given_length(config, "lr_warmup")
    fraction = config.schedule.lr_warmup_fraction
    length: float = 0 if warmup is None else in_lr_units(config, warmup, dp_size)
    if fraction is not None:
        length = fraction * decay_length(config, dp_size)
    if length > 0 and config.schedule.lr_warmup_style == "log":
        return max(length, 2 * _lr_units_of_step(config, dp_size))
    return length


def _lr_units_of_step(config: Config, dp_size: int) -> int:
    """Samples or tokens of a step with the final batch size, in `lr_unit`."""
    return in_lr_units(config, ScheduleLength("lr_warmup_iters", 1), dp_size)


def learning_rate(config: Config, state: TrainState, dp_size: int) -> float:
    """Learning rate of the step after `state`."""
    return _scheduled_rate(config, state, dp_size, config.optimizer.lr, config.schedule.min_lr)


def decoupled_learning_rate(config: Config, state: TrainState, dp_size: int) -> float | None:
    """Learning rate of the parameters with --decoupled-lr in the step after `state`; None without
    the option."""
    peak = config.optimizer.decoupled_lr
    floor = config.optimizer.decoupled_min_lr
    if peak is None:
        return None
    floor = config.schedule.min_lr if floor is None else floor
    return _scheduled_rate(config, state, dp_size, peak, floor)


def _scheduled_rate(
    config: Config, state: TrainState, dp_size: int, peak: float, floor: float
) -> float:
    applied = state.applied_tokens if lr_unit(config) == "tokens" else state.applied_samples
    warmup = warmup_length(config, dp_size)
    decay = decay_length(config, dp_size)
    style = config.schedule.lr_decay_style
    is_ahead = style == "deepspeed-cosine"  # WarmupCosineLR is one step ahead
    if warmup > 0 and (applied < warmup or (applied == warmup and not is_ahead)):
        start = config.schedule.lr_warmup_init
        length = given_length(config, "lr_warmup")
        if config.schedule.lr_warmup_style == "linear":
            if length is not None and length.unit != "tokens" and lr_unit(config) == "tokens":
                # Linear in samples, as in Megatron-DeepSpeed, where a curriculum is a difference.
                applied = state.applied_samples
                warmup = _in_samples(config, length, dp_size)
            return start + (peak - start) * min(1.0, applied / warmup)
        # The order of the operations is DeepSpeed's, so that the results are equal.
        step = _lr_units_of_step(config, dp_size)
        factor = 1.0 / math.log(warmup / step) * math.log(applied / step + 1)
        return start + (peak - start) * (factor if applied < warmup else 1.0)
    if style == "constant":
        return peak
    if style == "piecewise":
        return peak * _interpolated(_rate_points(config, dp_size), applied)
    if applied > decay:
        return floor
    if style in ("inverse-square-root", "power"):
        ratio = max(warmup, 1) / max(applied, 1)
        power = config.schedule.lr_decay_power
        return max(floor, peak * (math.sqrt(ratio) if style != "power" else ratio**power))
    if style == "WSD":
        length = given_length(config, "lr_wsd_decay")
        assert length is not None
        annealing = in_lr_units(config, length, dp_size)
        annealed = max(0, applied - (decay - annealing))
        factor = DECAY_FACTORS[config.schedule.lr_wsd_decay_style](annealed / annealing)
    else:
        applied += _lr_units_of_step(config, dp_size) if is_ahead else 0
        progress = min(1.0, (applied - warmup) / (decay - warmup))
        factor = DECAY_FACTORS[style.removeprefix("deepspeed-")](progress)
    return floor + factor * (peak - floor) if factor < 1.0 else peak


def _rate_points(config: Config, dp_size: int) -> list[tuple[int, float]]:
    """--lr-decay-points as (position in `lr_unit`, factor of the maximum)."""
    length = decay_as_given(config)
    points = config.schedule.rate_points
    assert length is not None
    field = f"lr_decay_{length.unit}"
    return [
        (in_lr_units(config, ScheduleLength(field, position), dp_size), factor)
        for position, factor in points
    ]


def _interpolated(points: Sequence[tuple[int, float]], position: int) -> float:
    """The value at a position: linear between points, constant before and after them."""
    for (start, first), (end, last) in itertools.pairwise(points):
        if start <= position < end:
            return first + (last - first) * (position - start) / (end - start)
    return points[0][1] if position < points[0][0] else points[-1][1]


def weight_decay(config: Config, state: TrainState, dp_size: int) -> float:
    """Weight decay of the step after `state`, scheduled over the entire run.

    The schedule counts applied tokens if the run length is given in tokens only, else applied
    samples.
    """
    optimizer = config.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        return optimizer.weight_decay
    start = optimizer.start_weight_decay
    end = optimizer.end_weight_decay
    assert start is not None
    assert end is not None
    applied = state.applied_samples
    length = run_samples(config, dp_size)
    if length is None:
        applied = state.applied_tokens
        length = config.schedule.train_tokens
    assert length is not None
    progress = min(1.0, applied / length)
    linear = optimizer.weight_decay_incr_style == "linear"
    return start + (progress if linear else 1.0 - _half_cosine(progress)) * (end - start)


def _rampup(config: Config, dp_size: int) -> tuple[int, int]:
    """Number of batch size increments and samples over which they are spread; (0, 0) without a
    ramp-up."""
    if config.schedule.rampup_batch_size is None:
        return 0, 0
    start, increment, samples = config.schedule.rampup_batch_size
    levels = (config.final_global_batch_size(dp_size) - start) // increment
    return (levels, samples) if levels else (0, 0)


def _half_cosine(progress: float) -> float:
    """Half a cosine period, from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _line(progress: float) -> float:
    return 1.0 - progress


def _exponential(progress: float) -> float:
    return 2.0 * math.pow(0.5, progress) - 1.0


def _minus_sqrt(progress: float) -> float:
    return 1.0 - math.sqrt(progress)


DECAY_FACTORS: Mapping[str, Callable[[float], float]] = {
    "linear": _line,
    "cosine": _half_cosine,
    "exponential": _exponential,
    "minus_sqrt": _minus_sqrt,
}
"""Decays by style, from 1 to 0 as the progress goes from 0 to 1."""
