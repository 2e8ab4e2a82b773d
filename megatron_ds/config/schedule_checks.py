"""Checks of batch sizes, run length and schedule lengths against each other.

What depends on the computed schedule is checked by `megatron_ds.schedule_validation`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.config.arithmetic import nearest_multiples
from megatron_ds.config.fields import exclusive_problem, join_flags, with_value
from megatron_ds.config.problems import Problem, option
from megatron_ds.config.schedule import SCHEDULE_LENGTHS, ScheduleConfig, parse_batch_size_step


def schedule_problems(
    schedule: ScheduleConfig, dp_size: int, dp_size_terms: str = ""
) -> Iterator[Problem]:
    """Check run length, units, batch sizes and curriculum against each other.

    Args:
        dp_size: Data-parallel size; 0 if unknown.
        dp_size_terms: How it is computed, for messages.
    """
    if schedule.train_iters is None and schedule.train_samples is None:
        if schedule.train_tokens is None:
            names = ("train_iters", "train_samples", "train_tokens")
            yield Problem("run-length-required", *names, join_flags=join_flags(names))
    elif schedule.train_iters is not None and schedule.train_samples is not None:
        yield exclusive_problem(
            "train_iters", "train_samples", reason="both set the length of the run"
        )
    yield from _unit_problems(schedule)
    if schedule.lr_warmup_fraction is not None:
        for name in schedule.given_lengths("lr_warmup"):
            yield exclusive_problem(
                "lr_warmup_fraction", name, reason=f"both set {SCHEDULE_LENGTHS['lr_warmup']}"
            )
    if schedule.rampup_batch_size is not None:
        yield from _rampup_problems(schedule, *schedule.rampup_batch_size)
    if schedule.step_batch_size_schedule is not None:
        yield from _batch_size_step_problems(schedule)
    if schedule.curriculum_seqlen is not None:
        yield from _curriculum_problems(schedule, *schedule.curriculum_seqlen)
    if schedule.micro_batch_size > 0 and dp_size > 0:
        yield from _divisibility_problems(schedule, dp_size, dp_size_terms)


def _unit_problems(schedule: ScheduleConfig) -> Iterator[Problem]:
    """Check that each length has one unit, which is tokens or that of the run length."""
    wrong, right = None, "samples"
    if schedule.train_iters is not None and schedule.train_samples is None:
        wrong, right = "samples", "iters"
    elif schedule.train_samples is not None and schedule.train_iters is None:
        wrong, right = "iters", "samples"
    changing = _batch_size_schedule(schedule)
    for stem, length in SCHEDULE_LENGTHS.items():
        given = schedule.given_lengths(stem)
        if len(given) > 1:
            yield exclusive_problem(*given, reason=f"each sets {length}")
        elif wrong is not None and given == [f"{stem}_{wrong}"]:
            yield Problem(
                "schedule-unit-differs-from-run",
                given[0],
                f"train_{right}",
                with_value=with_value(schedule, given[0]),
                flag=option(f"train_{right}"),
                instead=option(f"{stem}_{right}"),
            )
        elif given == [f"{stem}_iters"] and changing is not None:
            yield Problem(
                "iterations-with-changing-batch-size",
                given[0],
                changing,
                with_value=with_value(schedule, given[0]),
                flag=option(changing),
                by_samples=option(f"{stem}_samples"),
                by_tokens=option(f"{stem}_tokens"),
            )
    if schedule.lr_decay_style == "WSD" and not schedule.given_lengths("lr_wsd_decay"):
        yield Problem(
            "wsd-decay-required", f"lr_wsd_decay_{right}", flag=option(f"lr_wsd_decay_{right}")
        )


def _batch_size_schedule(schedule: ScheduleConfig) -> str | None:
    """The field that changes the batch size during the run."""
    if schedule.train_iters is not None:
        return None  # reported as its own problem
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(schedule, name) is not None:
            return name
    return None


def _counted_in_iterations(schedule: ScheduleConfig, name: str, instead: str) -> Problem:
    return Problem(
        "batch-size-schedule-with-iterations",
        name,
        "train_iters",
        schedule=with_value(schedule, name),
        other=with_value(schedule, "train_iters"),
        instead=instead,
    )


def _batch_size_step_problems(schedule: ScheduleConfig) -> Iterator[Problem]:
    name, entries = "step_batch_size_schedule", schedule.batch_size_entries
    given = f"{option(name)} {' '.join(entries)}".rstrip()
    if schedule.rampup_batch_size is not None:
        yield exclusive_problem("rampup_batch_size", name, reason="both set the batch size")
    if schedule.train_iters is not None:
        yield _counted_in_iterations(schedule, name, join_flags(("train_samples", "train_tokens")))
    wrong = [entry for entry in entries if parse_batch_size_step(entry) is None]
    for entry in wrong or ([] if entries else [""]):
        yield Problem("malformed-batch-size-step", name, flag=option(name), entry=entry)
    if wrong or not entries:
        return
    steps = schedule.batch_size_steps
    if steps[0][0] != 0:
        yield Problem("first-batch-size-step-not-at-zero", name, given=given, entries=entries[0])
    for number in range(1, len(steps)):
        if steps[number][0] <= steps[number - 1][0]:
            yield Problem(
                "batch-size-steps-not-ascending",
                name,
                given=given,
                entry=entries[number],
                previous=entries[number - 1],
            )
    if schedule.global_batch_size not in (None, steps[-1][1]):
        yield Problem(
            "final-batch-size-differs",
            "global_batch_size",
            name,
            with_value=with_value(schedule, "global_batch_size"),
            steps=steps[-1][1],
            given=given,
        )


def _curriculum_problems(
    schedule: ScheduleConfig, start: int, end: int, steps: int
) -> Iterator[Problem]:
    given = with_value(schedule, "curriculum_seqlen")
    unit = schedule.curriculum_seqlen_step
    if start <= 0 or steps <= 0:
        yield Problem("curriculum-not-positive", given=given)
    elif start > end:
        yield Problem("curriculum-descends", given=given, start=start, end=end)
    elif unit > 0 and start % unit:
        yield Problem(
            "curriculum-start-not-a-multiple",
            given=given,
            start=start,
            with_value=with_value(schedule, "curriculum_seqlen_step"),
            nearest_multiples=nearest_multiples(start, unit),
        )


def _rampup_problems(
    schedule: ScheduleConfig, start: int, increment: int, samples: int
) -> Iterator[Problem]:
    given, final = with_value(schedule, "rampup_batch_size"), schedule.global_batch_size
    if schedule.train_iters is not None:
        yield _counted_in_iterations(schedule, "rampup_batch_size", option("train_samples"))
    if final is None:
        yield Problem("rampup-requires-global-batch-size", given=given)
    if start <= 0 or increment <= 0 or samples < 0:
        yield Problem("rampup-not-positive", given=given)
    elif final is not None and start > final > 0:
        yield Problem(
            "rampup-start-exceeds-final",
            given=given,
            start=start,
            with_value=with_value(schedule, "global_batch_size"),
        )
    elif final is not None and (final - start) % increment:
        below = start + (final - start) // increment * increment
        yield Problem(
            "rampup-misses-final",
            given=given,
            increment=increment,
            start=start,
            with_value=with_value(schedule, "global_batch_size"),
            below=below,
            above=below + increment,
        )


def _divisibility_problems(
    schedule: ScheduleConfig, dp_size: int, dp_size_terms: str
) -> Iterator[Problem]:
    """Check that every batch size is a multiple of micro-batch size x data-parallel size."""
    unit = schedule.micro_batch_size * dp_size
    terms = f"{with_value(schedule, 'micro_batch_size')} x data-parallel size {dp_size} = {unit}"
    if dp_size_terms:
        terms += f", with data-parallel size = {dp_size_terms}"

    def not_divisible(what: str, size: int, name: str) -> Problem:
        return Problem(
            "batch-size-not-divisible",
            name,
            "micro_batch_size",
            what=what,
            terms=terms,
            nearest_multiples=nearest_multiples(size, unit),
        )

    for tokens, size in schedule.batch_size_steps:
        if size % unit:
            name = "step_batch_size_schedule"
            yield not_divisible(
                f"{option(name)}: batch size {size} from {tokens:,} tokens", size, name
            )
    if schedule.batch_size_steps:
        return
    total = unit if schedule.global_batch_size is None else schedule.global_batch_size
    if total > 0 and total % unit:
        yield not_divisible(with_value(schedule, "global_batch_size"), total, "global_batch_size")
    start, increment, _ = schedule.rampup_batch_size or (unit, unit, 0)
    if start <= 0 or increment <= 0:
        return
    # If the first two batch sizes are divisible, so are their difference and all later ones.
    for stage, size in enumerate((start, start + increment), 1):
        if size <= total and size % unit:
            stages = (total - start) // increment + 1
            given = with_value(schedule, "rampup_batch_size")
            yield not_divisible(
                f"{given}: batch size {size} (stage {stage} of {stages})", size, "rampup_batch_size"
            )
            return
