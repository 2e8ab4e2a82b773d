"""Options of batch size, run length, sequence length and learning rate schedule."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from megatron_ds.config.checks import nearest_multiples
from megatron_ds.config.fields import (
    ANY_VALUE,
    NON_ZERO,
    UNSET_INT,
    Decides,
    InPhase,
    exclusive_problem,
    in_effect,
    option_field,
    when,
)
from megatron_ds.config.options.parallel import ParallelConfig
from megatron_ds.config.problems import Problem, option, with_value
from megatron_ds.dataclass import dataclass

SCHEDULE_UNITS = ("iters", "samples", "tokens")
"""Units in which a length of the schedule can be given."""
SCHEDULE_LENGTHS = {
    "lr_decay": "the length of the decay",
    "lr_warmup": "the length of the warmup",
    "lr_wsd_decay": "the length of the WSD decay",
}
"""Lengths of the learning rate schedule; each has one field per unit."""
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

DECAY_STYLES = (
    "linear",
    "cosine",
    "inverse-square-root",
    "WSD",
    "minus_sqrt",
    "power",
    "deepspeed-cosine",
)
ENDLESS_STYLES = ("constant", "piecewise")
"""Styles on which the length of the decay has no effect."""
WSD, POWER, PIECEWISE = (when(lr_decay_style=style) for style in ("WSD", "power", "piecewise"))
WARMUP = when(
    lr_warmup_iters=NON_ZERO,
    lr_warmup_samples=NON_ZERO,
    lr_warmup_tokens=NON_ZERO,
    lr_warmup_fraction=NON_ZERO,
)

_length = functools.partial(option_field, None, minimum=1)


@dataclass(frozen=True)
class ScheduleConfig:
    """Batch size, run length and learning rate schedule."""

    DECIDES = Decides.SCHEDULE

    micro_batch_size: int = option_field(
        UNSET_INT,
        aliases=("batch-size",),
        required=True,
        minimum=1,
        common=True,
        decides=Decides.TRAINING,
        in_phase=InPhase.REPLACED,
    )
    """Batch size of one forward pass of one data-parallel rank, in samples."""
    global_batch_size: int | None = option_field(
        None, minimum=1, common=True, decides=Decides.TRAINING, in_phase=InPhase.REPLACED
    )
    """Samples per optimizer step (default: micro-batch size x data-parallel size)."""
    rampup_batch_size: tuple[int, int, int] | None = option_field(
        None, nargs=3, metavar="N", decides=Decides.TRAINING, in_phase=InPhase.COUNTED
    )
    """START INCREMENT SAMPLES: increase the global batch size linearly from START, by INCREMENT
    each time, to --global-batch-size over SAMPLES samples."""
    step_batch_size_schedule: tuple[str, ...] | None = option_field(
        None, nargs="*", metavar="TOKENS:BATCH", decides=Decides.TRAINING, in_phase=InPhase.COUNTED
    )
    """0:BATCH TOKENS:BATCH ...: global batch size from each number of consumed tokens; the suffixes
    K, M, B and T are 1e3, 1e6, 1e9 and 1e12."""
    curriculum_seqlen: tuple[int, int, int] | None = option_field(
        None, nargs=3, metavar="N", decides=Decides.TRAINING, in_phase=InPhase.COUNTED
    )
    """START END STEPS: increase the sequence length linearly from START to END tokens over STEPS
    iterations; samples are truncated to it, and the rest is not trained on."""
    curriculum_seqlen_step: int = option_field(
        8,
        minimum=1,
        only_with=when(curriculum_seqlen=ANY_VALUE),
        decides=Decides.TRAINING,
        in_phase=InPhase.REPLACED,
    )
    """The sequence length is a multiple of this value (DeepSpeed's difficulty_step)."""
    skip_train_iteration_range: tuple[str, ...] | None = option_field(
        None,
        aliases=("iterations-to-skip",),
        nargs="*",
        metavar="START-END",
        decides=Decides.TRAINING,
    )
    """Iterations START to END, both included, whose samples are not trained on."""
    stages: tuple[str, ...] = option_field((), nargs="*", metavar="STAGE", decides=Decides.SAMPLES)
    """Stages of the run in order, each as '{name: NAME, train-tokens: N, ...}' with flags that
    replace those of the run (docs/training/stages.md)."""
    train_iters: int | None = _length(zero_is_off=True, common=True, in_phase=InPhase.COUNTED)
    """Run length in iterations."""
    train_samples: int | None = _length(zero_is_off=True, in_phase=InPhase.COUNTED)
    """Run length in samples."""
    train_tokens: int | None = _length(in_phase=InPhase.COUNTED)
    """Run length in tokens: the run ends with the step that reaches it, or earlier with
    --train-iters or --train-samples."""
    lr_decay_style: str = option_field(
        "linear", choices=(*ENDLESS_STYLES, *DECAY_STYLES), common=True, in_phase=InPhase.REPLACED
    )
    """Learning rate schedule after warmup; deepspeed-cosine is one step ahead of cosine."""
    lr_decay_power: float = option_field(0.5, above=0, only_with=POWER)
    """Exponent P of --lr x (warmup / position)^P."""
    lr_decay_points: tuple[str, ...] | None = option_field(
        None, nargs="*", metavar="POSITION:FACTOR", only_with=PIECEWISE
    )
    """POSITION:FACTOR ...: factors of --lr, linear between the positions, which are in the unit of
    the run length (or of --lr-decay-samples, -tokens); suffixes K, M, B and T."""
    lr_decay_iters: int | None = _length(in_phase=InPhase.COUNTED)
    """Number of iterations to decay the learning rate over (default: --train-iters)."""
    lr_decay_samples: int | None = _length(in_phase=InPhase.COUNTED)
    """Number of samples to decay the learning rate over (default: --train-samples)."""
    lr_decay_tokens: int | None = _length(in_phase=InPhase.COUNTED)
    """Number of tokens to decay the learning rate over (default: --train-tokens)."""
    lr_warmup_iters: int = option_field(0, minimum=0, common=True, in_phase=InPhase.COUNTED)
    """Linear warmup in iterations."""
    lr_warmup_samples: int = option_field(0, minimum=0, in_phase=InPhase.COUNTED)
    """Linear warmup in samples."""
    lr_warmup_tokens: int | None = option_field(None, minimum=0, in_phase=InPhase.COUNTED)
    """Linear warmup in tokens."""
    lr_warmup_fraction: float | None = option_field(
        None, minimum=0, maximum=1, in_phase=InPhase.COUNTED
    )
    """Linear warmup as a fraction of the decay."""
    lr_warmup_init: float = option_field(
        0.0, minimum=0, only_with=WARMUP, in_phase=InPhase.REPLACED
    )
    """Learning rate at the start of warmup."""
    lr_warmup_style: str = option_field(
        "linear", choices=("linear", "log"), only_with=WARMUP, in_phase=InPhase.REPLACED
    )
    """Course of the warmup; log is DeepSpeed's: log(step) / log(steps of the warmup)."""
    min_lr: float = option_field(
        0.0, minimum=0, only_with=when(lr_decay_style=DECAY_STYLES), in_phase=InPhase.REPLACED
    )
    """Minimum learning rate after warmup."""
    lr_wsd_decay_style: str = option_field(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        only_with=WSD,
        in_phase=InPhase.REPLACED,
    )
    """Decay style of the annealing phase of WSD."""
    lr_wsd_decay_iters: int | None = _length(only_with=WSD, in_phase=InPhase.COUNTED)
    """Annealing phase of WSD in iterations."""
    lr_wsd_decay_samples: int | None = _length(only_with=WSD, in_phase=InPhase.COUNTED)
    """Annealing phase of WSD in samples."""
    lr_wsd_decay_tokens: int | None = _length(only_with=WSD, in_phase=InPhase.COUNTED)
    """Annealing phase of WSD in tokens."""

    @property
    def batch_size_steps(self) -> tuple[tuple[int, int], ...]:
        """--step-batch-size-schedule as (tokens, batch size), without malformed entries."""
        parsed = map(parse_batch_size_step, self.batch_size_entries)
        return tuple(entry for entry in parsed if entry is not None)

    @property
    def rate_points(self) -> list[tuple[int, float]]:
        """--lr-decay-points as (position, factor), without malformed entries."""
        parsed = map(parse_rate_point, _entries(self.lr_decay_points))
        return [point for point in parsed if point is not None]

    @property
    def skipped_ranges(self) -> tuple[tuple[int, int], ...]:
        """--skip-train-iteration-range as (first, last), joined, without malformed entries."""
        parsed = map(parse_iteration_range, self.skip_train_iteration_range or ())
        joined: list[tuple[int, int]] = []
        for first, last in sorted(span for span in parsed if span is not None):
            if joined and first <= joined[-1][1] + 1:
                first = joined[-1][0]
                last = max(last, joined.pop()[1])
            joined.append((first, last))
        return tuple(joined)

    @property
    def batch_size_entries(self) -> list[str]:
        """The entries of --step-batch-size-schedule, separated by spaces or commas."""
        return _entries(self.step_batch_size_schedule)

    @property
    def derived_values(self) -> dict[str, Any]:
        """The length of the decay, by default the run's, whose length has no other effect."""
        is_endless = self.lr_decay_style in ENDLESS_STYLES
        has_decay = not is_endless or self.lr_warmup_fraction is not None
        is_of_run = has_decay and not self.given_lengths("lr_decay")
        stem = "train" if is_of_run else "lr_decay"
        lengths: dict[str, Any] = {}
        for unit in SCHEDULE_UNITS:
            lengths[f"lr_decay_{unit}"] = getattr(self, f"{stem}_{unit}") if has_decay else None
            lengths[f"train_{unit}"] = getattr(self, f"train_{unit}") if is_of_run else None
        return lengths

    @property
    def has_warmup(self) -> bool:
        """Whether a length of the warmup is set."""
        return bool(self.lr_warmup_fraction or self.given_lengths("lr_warmup"))

    def given_lengths(self, stem: str) -> list[str]:
        """The fields of a length (train, lr_decay, lr_warmup, lr_wsd_decay) that are set."""
        return [name for unit in SCHEDULE_UNITS if getattr(self, name := f"{stem}_{unit}")]

    def problems(
        self, parallel: ParallelConfig, world_size: int, start_samples: int = 0
    ) -> Iterator[Problem]:
        """Check run length, units, batch sizes and curriculum against each other.

        A ramp-up may have batch sizes that do not fit before the first of `start_samples`.

        What depends on the computed schedule is checked by `megatron_ds.schedule_validation`.
        """
        if self.train_iters is None and self.train_samples is None:
            if self.train_tokens is None:
                yield Problem("run-length-required")
        elif self.train_iters is not None and self.train_samples is not None:
            reason = "both set the length of the run"
            yield exclusive_problem("train_iters", "train_samples", reason=reason)
        yield from self._unit_problems()
        if self.lr_warmup_fraction is not None:
            for name in self.given_lengths("lr_warmup"):
                reason = f"both set {SCHEDULE_LENGTHS['lr_warmup']}"
                yield exclusive_problem("lr_warmup_fraction", name, reason=reason)
        if self.rampup_batch_size is not None:
            yield from _rampup_problems(self, *self.rampup_batch_size)
        if self.step_batch_size_schedule is not None:
            yield from self._batch_size_step_problems()
        if self.curriculum_seqlen is not None:
            yield from _curriculum_problems(self, *self.curriculum_seqlen)
        yield from _iteration_range_problems(self.skip_train_iteration_range or ())
        dp_size = parallel.data_parallel_size(world_size)
        if self.micro_batch_size > 0 and dp_size > 0:
            unit = self.micro_batch_size * dp_size
            for name, size, what in self._sizes_not_divisible_by(unit, start_samples):
                yield Problem(
                    "batch-size-not-divisible",
                    name,
                    "micro_batch_size",
                    settings=self,
                    what=what,
                    dp_size=dp_size,
                    unit=unit,
                    dp_size_terms=parallel.describe_data_parallel_size(world_size),
                    nearest=nearest_multiples(size, unit),
                    size=size,
                    valid=_valid_dp_sizes(size, self.micro_batch_size),
                )
            yield from _folded_pipeline_problems(self, parallel, unit)

    def _unit_problems(self) -> Iterator[Problem]:
        """Check that each length has one unit: tokens, or the unit of the run length."""
        wrong = None
        right = "samples"
        changing = None
        if self.train_iters is not None and self.train_samples is None:
            wrong = "samples"
            right = "iters"
        elif self.train_samples is not None and self.train_iters is None:
            wrong = "iters"
        if self.train_iters is None:  # otherwise a changing batch size is its own problem
            schedules = ("rampup_batch_size", "step_batch_size_schedule")
            changing = next((name for name in schedules if getattr(self, name) is not None), None)
        for stem, length in SCHEDULE_LENGTHS.items():
            names = in_effect(self).given_lengths(stem)
            if len(names) > 1:
                yield exclusive_problem(*names, reason=f"each sets {length}")
            elif wrong is not None and names == [f"{stem}_{wrong}"]:
                fields = names[0], f"train_{right}"
                yield Problem(
                    "schedule-unit-differs-from-run", *fields, settings=self, stem=stem, unit=right
                )
            elif names == [f"{stem}_iters"] and changing is not None:
                fields = names[0], changing
                yield Problem(
                    "iterations-with-changing-batch-size", *fields, settings=self, stem=stem
                )
        if self.lr_decay_style == "WSD" and not self.given_lengths("lr_wsd_decay"):
            yield Problem("wsd-decay-required", f"lr_wsd_decay_{right}")
        if self.lr_decay_style == "piecewise":
            yield from _rate_point_problems(_entries(self.lr_decay_points) or [""])

    def _batch_size_step_problems(self) -> Iterator[Problem]:
        name = "step_batch_size_schedule"
        entries = self.batch_size_entries
        text = f"{option(name)} {' '.join(entries)}".rstrip()
        if self.rampup_batch_size is not None:
            yield exclusive_problem("rampup_batch_size", name, reason="both set the batch size")
        yield from _counted_in_iterations(self, name, "train_samples", "train_tokens")
        wrong = [entry for entry in entries or [""] if parse_batch_size_step(entry) is None]
        yield from (Problem("malformed-batch-size-step", name, entry=entry) for entry in wrong)
        if wrong:
            return
        steps = self.batch_size_steps
        if steps[0][0] != 0:
            yield Problem("first-batch-size-step-not-at-zero", name, given=text, first=entries[0])
        pairs = itertools.pairwise(zip(steps, entries, strict=True))
        for ((before, _), previous), ((tokens, _), entry) in pairs:
            if tokens <= before:
                yield Problem(
                    "batch-size-steps-not-ascending", given=text, entry=entry, previous=previous
                )
        if self.global_batch_size not in (None, steps[-1][1]):
            names = ("global_batch_size", name)
            final = steps[-1][1]
            yield Problem(
                "final-batch-size-differs", *names, settings=self, final=final, given=text
            )

    def _sizes_not_divisible_by(
        self, unit: int, start_samples: int
    ) -> Iterator[tuple[str, int, str]]:
        """Batch sizes that are not a multiple of `unit`, as (field, size, description)."""
        for tokens, size in self.batch_size_steps:
            if size % unit:
                name = "step_batch_size_schedule"
                yield name, size, f"{option(name)}: batch size {size} from {tokens:,} tokens"
        if self.batch_size_steps:
            return
        name = "global_batch_size"
        final = self.global_batch_size
        total = unit if final is None else final
        if total > 0 and total % unit:
            yield name, total, with_value(self, name)
        name = "rampup_batch_size"
        ramp = self.rampup_batch_size or (unit, unit, 0)
        start, increment, samples = ramp
        if start <= 0 or increment <= 0:
            return
        levels = (total - start) // increment
        first = min(levels, start_samples * levels // samples) if samples > 0 else 0
        # If the first two batch sizes are divisible, so are their difference and all later ones.
        for stage in (first, first + 1):
            size = start + stage * increment
            if size <= total and size % unit:
                shown = (
                    f"stage {stage + 1} of {levels + 1}; those before a loaded checkpoint are free"
                )
                yield name, size, f"{with_value(self, name)}: batch size {size} ({shown})"
                return


def _iteration_range_problems(entries: Sequence[str]) -> Iterator[Problem]:
    malformed = (entry for entry in entries if parse_iteration_range(entry) is None)
    yield from (Problem("malformed-iteration-range", entry=entry) for entry in malformed)


def _rate_point_problems(entries: list[str]) -> Iterator[Problem]:
    points = [parse_rate_point(entry) for entry in entries]
    for entry, point, before in zip(entries, points, [None, *points], strict=False):
        if point is None or (before is not None and point[0] <= before[0]):
            yield Problem("malformed-rate-point", entry=entry)


def _valid_dp_sizes(size: int, micro_batch_size: int) -> str:
    """Data-parallel sizes with which a batch has an integer number of micro-batches."""
    count, rest = divmod(size, micro_batch_size)
    return ", ".join(str(n) for n in range(1, count + 1) if not rest and count % n == 0) or "none"


def _folded_pipeline_problems(
    options: ScheduleConfig, parallel: ParallelConfig, unit: int
) -> Iterator[Problem]:
    """Check that no step has fewer micro-batches than two stages on each rank need."""
    if parallel.num_stages == parallel.pipeline_model_parallel_size:
        return
    steps = [size for _, size in options.batch_size_steps]
    smallest = min(
        steps or [options.global_batch_size or unit, *(options.rampup_batch_size or ())[:1]]
    )
    count = smallest // unit
    least = unit * parallel.num_stages
    if count < parallel.num_stages:
        yield Problem(
            "dualpipev-micro-batches", settings=parallel, size=smallest, count=count, least=least
        )


def _counted_in_iterations(options: ScheduleConfig, name: str, *instead: str) -> Iterator[Problem]:
    """The problem of a batch size schedule if the run length is in iterations."""
    if options.train_iters is not None:
        fields = (name, "train_iters")
        flags = " and ".join(map(option, instead))
        yield Problem(
            "batch-size-schedule-with-iterations", *fields, settings=options, instead=flags
        )


def _curriculum_problems(
    options: ScheduleConfig, start: int, end: int, steps: int
) -> Iterator[Problem]:
    unit = options.curriculum_seqlen_step
    if start <= 0 or steps <= 0:
        yield Problem("curriculum-not-positive", settings=options)
    elif start > end:
        yield Problem("curriculum-descends", settings=options)
    elif unit > 0 and start % unit:
        nearest = nearest_multiples(start, unit)
        yield Problem("curriculum-start-not-a-multiple", settings=options, nearest=nearest)


def _rampup_problems(
    options: ScheduleConfig, start: int, increment: int, samples: int
) -> Iterator[Problem]:
    final = options.global_batch_size
    yield from _counted_in_iterations(options, "rampup_batch_size", "train_samples")
    if final is None:
        yield Problem("rampup-requires-global-batch-size", settings=options)
    if start <= 0 or increment <= 0 or samples < 0:
        yield Problem("rampup-not-positive", settings=options)
    elif final is not None and start > final > 0:
        yield Problem("rampup-start-exceeds-final", settings=options)
    elif final is not None and (final - start) % increment:
        below = start + (final - start) // increment * increment
        above = below + increment
        yield Problem("rampup-misses-final", settings=options, below=below, above=above)


def parse_iteration_range(entry: str) -> tuple[int, int] | None:
    """Parse `101-200` into (101, 200), `7` into (7, 7); None if malformed or empty."""
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", entry)
    if match is None:
        return None
    first = int(match[1])
    last = int(match[2] or match[1])
    return (first, last) if 1 <= first <= last else None


def parse_batch_size_step(entry: str) -> tuple[int, int] | None:
    """Parse `250B:1536` into (250_000_000_000, 1536); None if malformed."""
    point = _parse_point(entry, "([0-9]{1,18})")
    return (point[0], int(point[1])) if point is not None and int(point[1]) >= 1 else None


def parse_rate_point(entry: str) -> tuple[int, float] | None:
    """Parse `10K:0.5` into (10_000, 0.5); None if malformed or larger than 1."""
    point = _parse_point(entry, r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:E-?[0-9]{1,2})?)")
    return (point[0], float(point[1])) if point is not None and float(point[1]) <= 1 else None


def _parse_point(entry: str, form: str) -> tuple[int, str] | None:
    """Parse POSITION:VALUE, with a suffix of the position; None if malformed."""
    match = re.fullmatch(rf"([0-9]{{1,18}}(?:\.[0-9]{{1,12}})?)([KMBT]?):{form}", entry.upper())
    position = Fraction(match[1]) * SUFFIXES[match[2]] if match is not None else Fraction(1, 2)
    return (int(position), match[3]) if match is not None and position.denominator == 1 else None


def _entries(texts: tuple[str, ...] | None) -> list[str]:
    """Entries that are separated by spaces or commas."""
    return " ".join(texts or ()).replace(",", " ").split()
