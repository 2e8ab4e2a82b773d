"""Translates the schedules of a DeepSpeed file, learning rate and curriculum, into our flags.

A `scheduler` block is translated if one of our schedules gives exactly its learning rates. Others
are refused with the flags of the nearest schedule. Absent keys have DeepSpeed's defaults, unless
their flag was given.

Older DeepSpeed versions truncated samples by a `curriculum_learning` block; the installed one
rejects it, so it is not passed on. Only the schedule of Megatron-DeepSpeed's files is supported:
sequence length, fixed_linear.

Does not know which flags were given.
Sources: deepspeed.runtime.lr_schedules, deepspeed.runtime.data_pipeline.curriculum_scheduler
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.data_files import read_table
from megatron_ds.config.deepspeed_file import DeepSpeedFile, get, has
from megatron_ds.config.problems import Problem, option

TABLES = read_table(__file__)
TRANSLATED: dict[str, str] = TABLES["decay_styles"]
"""Our --lr-decay-style by type."""
DECAY_MAX_LR = next(row[3] for row in TABLES["WarmupDecayLR"] if row[0] == "warmup_max_lr")
"""DeepSpeed's default of warmup_max_lr in WarmupDecayLR."""
CURRICULUM = "curriculum_learning"
LENGTHS = (
    f"{CURRICULUM}.min_difficulty",
    f"{CURRICULUM}.max_difficulty",
    f"{CURRICULUM}.schedule_config.total_curriculum_step",
)
"""Keys of the three values of --curriculum-seqlen."""
STEP = f"{CURRICULUM}.schedule_config.difficulty_step"

FieldValues = Iterator[tuple[str, str, Any]]
"""Key, field of the configuration, and the value that the key gives it."""


def scheduler_fields(config: Config, file: DeepSpeedFile, batch_size: int) -> FieldValues:
    """Translate a scheduler block without problems.

    DeepSpeed's own engine uses the first learning rate twice, because it steps the scheduler for
    the first time after a step. Here the rate of step n is used in step n.

    Args:
        config: Configuration filled so far.
        file: DeepSpeed file.
        batch_size: Samples per step.
    """
    scheduler = file.get("scheduler.type")
    if scheduler not in TRANSLATED:
        return
    by_samples = config.schedule.train_samples is not None
    per_step, unit = (batch_size, "samples") if by_samples else (1, "iters")
    yield "scheduler.type", "lr_decay_style", TRANSLATED[scheduler]
    is_warming = config.schedule.has_warmup
    block = "scheduler.params"
    lr = 0.0 if math.isnan(config.optimizer.lr) else config.optimizer.lr

    def as_rate(ratio: Any) -> float:
        return float(ratio) * lr

    def as_length(steps: Any) -> int:
        return int(steps) * per_step

    def as_warmup(steps: Any) -> int:
        # DeepSpeed replaces 1 by 2, since its logarithmic warm-up cannot have one step.
        return max(2, int(steps)) * per_step

    conversions: dict[str, Callable[[Any], float]] = {
        "rate": float,
        "ratio": as_rate,
        "steps": as_length,
        "warmup": as_warmup,
    }
    for name, stem, rule, *default in TABLES[scheduler]:
        key = f"{block}.{name}"
        value = file.get(f"{block}.{name}")
        field = stem.format(unit=unit)
        has_default = default and not (rule == "warmup" and is_warming)
        if value is not None:
            yield key, field, conversions[rule](value)
        elif has_default and not has(file.values, key) and field not in config.given:
            yield "scheduler.type", field, conversions[rule](*default)
    style = f"{block}.warmup_type"
    steps = f"{block}.warmup_num_steps"
    has_steps = is_warming or get(file.values, steps) != "auto"
    if has_steps and (file.get(style) or "lr_warmup_style" not in config.given):
        origin = style if file.get(style) else "scheduler.type"
        yield origin, "lr_warmup_style", file.get(style) or "log"


def scheduler_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    """Find out why a scheduler block cannot be translated, and which flags replace it."""
    scheduler = file.get("scheduler.type")
    key = "scheduler.type"
    if scheduler is None:
        return  # DeepSpeed has no schedule then
    if scheduler not in TRANSLATED:
        supported = ", ".join(TRANSLATED)
        problem = Problem("ds-scheduler-unsupported", kind=scheduler, translated=supported)
        yield file.at(key, problem)
    else:
        yield from _translation_problems(config, file, scheduler)


def _translation_problems(config: Config, file: DeepSpeedFile, scheduler: str) -> Iterator[Problem]:
    steps = "scheduler.params.warmup_num_steps"
    if file.get(steps) is not None and file.get(steps) <= 0:
        yield file.invalid(steps, "must be positive", "lr_warmup_iters")
    params = file.values["scheduler"].get("params") or {}
    if scheduler != "WarmupLR" and not params.get("total_num_steps"):
        problem = Problem("ds-scheduler-without-total-steps", scheduler=scheduler)
        yield file.at("scheduler.type", problem)
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(config.schedule, name) is not None:
            problem = Problem("ds-scheduler-with-varying-batch", name, flag=option(name))
            yield file.at("scheduler", problem)


def curriculum_fields(file: DeepSpeedFile) -> FieldValues:
    """Translate a curriculum block, if it has no problems."""
    if file.get(CURRICULUM) is not None and not any(curriculum_problems(file)):
        yield CURRICULUM, "curriculum_seqlen", tuple(int(file.get(key)) for key in LENGTHS)
        yield STEP, "curriculum_seqlen_step", int(file.get(STEP))


def curriculum_problems(file: DeepSpeedFile) -> Iterator[Problem]:
    """Find out why a curriculum block cannot be translated."""
    if file.get(CURRICULUM) is None:
        return
    if file.get(f"{CURRICULUM}.enabled") is None:
        yield _incomplete(file, '"enabled": true (or false, DeepSpeed\'s default)')
    for name, supported in (("curriculum_type", "seqlen"), ("schedule_type", "fixed_linear")):
        key = f"{CURRICULUM}.{name}"
        value = file.get(key)
        if value is None:
            yield _incomplete(file, f'"{name}": "{supported}"')
        elif value != supported:
            reason = f"only {supported!r} is supported; use {option('curriculum_seqlen')}"
            yield file.invalid(key, reason, "curriculum_seqlen")
            return
    missing = [key for key in (*LENGTHS, STEP) if file.get(key) is None]
    for key in missing:
        yield _incomplete(file, key)
    if missing:
        return
    end = int(file.get(LENGTHS[1]))
    step = int(file.get(STEP))
    if step > 0 and end % step:
        reason = (
            f"not a multiple of difficulty_step {step}; DeepSpeed stops at {end - end % step}, "
            "write that"
        )
        yield file.invalid(LENGTHS[1], reason, "curriculum_seqlen", "curriculum_seqlen_step")


def _incomplete(file: DeepSpeedFile, missing: str) -> Problem:
    problem = Problem("ds-curriculum-incomplete", block=CURRICULUM, missing=missing)
    return file.at(CURRICULUM, problem)
