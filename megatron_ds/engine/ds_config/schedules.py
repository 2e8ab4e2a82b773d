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
from megatron_ds.config.options.deepspeed_file import DeepSpeedFile, get, has
from megatron_ds.config.problems import Problem, option

TRANSLATED = ("WarmupLR", "WarmupDecayLR")
WARMUP_STEPS, DECAY_MAX_LR = 1000, 0.001
"""DeepSpeed's defaults of warmup_num_steps, and of warmup_max_lr in WarmupDecayLR."""
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
    yield "scheduler.type", "lr_decay_style", "constant" if scheduler == "WarmupLR" else "linear"
    is_warming, block = config.schedule.has_warmup, "scheduler.params"
    fields: list[tuple[str, str, Callable[[Any], float], Any]] = [
        ("warmup_min_lr", "lr_warmup_init", float, None),
        ("warmup_max_lr", "lr", float, None if scheduler == "WarmupLR" else DECAY_MAX_LR),
        # DeepSpeed replaces 1 by 2, since its logarithmic warm-up cannot have one step.
        (
            "warmup_num_steps",
            f"lr_warmup_{unit}",
            lambda steps: max(2, int(steps)) * per_step,
            None if is_warming else WARMUP_STEPS,
        ),
    ]
    if scheduler == "WarmupDecayLR":
        fields += [
            ("warmup_min_lr", "min_lr", float, None),
            ("total_num_steps", f"lr_decay_{unit}", lambda steps: int(steps) * per_step, None),
        ]
    for name, field, convert, default in fields:
        key, value = f"{block}.{name}", file.get(f"{block}.{name}")
        if value is not None:
            yield key, field, convert(value)
        elif default is not None and not has(file.values, key) and field not in config.given:
            yield "scheduler.type", field, convert(default)
    style, steps = f"{block}.warmup_type", f"{block}.warmup_num_steps"
    has_steps = is_warming or get(file.values, steps) != "auto"
    if has_steps and (file.get(style) or "lr_warmup_style" not in config.given):
        origin = style if file.get(style) else "scheduler.type"
        yield origin, "lr_warmup_style", file.get(style) or "log"


def scheduler_problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    """Find out why a scheduler block cannot be translated, and which flags replace it."""
    scheduler, key = file.get("scheduler.type"), "scheduler.type"
    if scheduler is None:
        return  # DeepSpeed has no schedule then
    if scheduler == "WarmupCosineLR":
        flags = _cosine_flags(config, file)
        yield file.at(key, Problem("ds-scheduler-inexact", cosine_flags=flags))
    elif scheduler not in TRANSLATED:
        supported = " and ".join(TRANSLATED)
        problem = Problem("ds-scheduler-unsupported", kind=scheduler, translated=supported)
        yield file.at(key, problem)
    else:
        yield from _translation_problems(config, file, scheduler)


def _translation_problems(config: Config, file: DeepSpeedFile, scheduler: str) -> Iterator[Problem]:
    steps = "scheduler.params.warmup_num_steps"
    if file.get(steps) is not None and file.get(steps) <= 0:
        yield file.invalid(steps, "must be positive", "lr_warmup_iters")
    params = file.values["scheduler"].get("params") or {}
    if scheduler == "WarmupDecayLR" and not params.get("total_num_steps"):
        yield file.at("scheduler.type", Problem("ds-scheduler-without-total-steps"))
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(config.schedule, name) is not None:
            problem = Problem("ds-scheduler-with-varying-batch", name, flag=option(name))
            yield file.at("scheduler", problem)


def _cosine_flags(config: Config, file: DeepSpeedFile) -> str:
    def param(name: str, default: Any) -> Any:
        value = file.get(f"scheduler.params.{name}")
        return default if value is None else value

    lr = 0.0 if math.isnan(config.optimizer.lr) else config.optimizer.lr
    flags = {
        "lr_decay_style": "cosine",
        "lr_warmup_iters": param("warmup_num_steps", 1000),
        "lr_decay_iters": param("total_num_steps", "N"),
        "lr_warmup_init": f"{lr * param('warmup_min_ratio', 0.0):g}",
        "min_lr": f"{lr * param('cos_min_ratio', 0.0001):g}",
    }
    return " ".join(f"{option(name)} {value}" for name, value in flags.items())


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
    end, step = int(file.get(LENGTHS[1])), int(file.get(STEP))
    if step > 0 and end % step:
        reason = (
            f"not a multiple of difficulty_step {step}; DeepSpeed stops at {end - end % step}, "
            "write that"
        )
        yield file.invalid(LENGTHS[1], reason, "curriculum_seqlen", "curriculum_seqlen_step")


def _incomplete(file: DeepSpeedFile, missing: str) -> Problem:
    problem = Problem("ds-curriculum-incomplete", block=CURRICULUM, missing=missing)
    return file.at(CURRICULUM, problem)
