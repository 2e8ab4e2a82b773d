"""Translates the `scheduler` block of a DeepSpeed file into our schedule flags.

A DeepSpeed scheduler is translated if one of our schedules gives exactly its learning rates.
Others are refused with the flags of the nearest schedule. Does not know which flags were given.
Source: deepspeed.runtime.lr_schedules
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, option
from megatron_ds.engine.ds_config_file import DeepSpeedFile

TRANSLATED = ("WarmupLR", "WarmupDecayLR")


@dataclass(frozen=True)
class TranslatedKey:
    """The value that a key gives a field of the configuration."""

    key: str
    field: str
    value: Any


def translate(config: Config, file: DeepSpeedFile, batch_size: int) -> Iterator[TranslatedKey]:
    """Translate a scheduler block without problems.

    DeepSpeed's own engine uses the first learning rate twice, because it steps the scheduler for
    the first time after a step. Here the rate of step n is used in step n.

    Args:
        config: Configuration filled so far.
        file: DeepSpeed file.
        batch_size: Samples per step.
    """
    kind = file.get("scheduler.type")
    if kind not in TRANSLATED:
        return
    by_samples = config.schedule.train_samples is not None
    per_step, unit = (batch_size, "samples") if by_samples else (1, "iters")
    style = "constant" if kind == "WarmupLR" else "linear"
    yield TranslatedKey("scheduler.type", "lr_decay_style", style)
    lowest = file.get("scheduler.params.warmup_min_lr")
    if lowest is not None:
        yield TranslatedKey("scheduler.params.warmup_min_lr", "lr_warmup_init", float(lowest))
    if lowest is not None and style == "linear":
        yield TranslatedKey("scheduler.params.warmup_min_lr", "min_lr", float(lowest))
    highest = file.get("scheduler.params.warmup_max_lr")
    if highest is not None:
        yield TranslatedKey("scheduler.params.warmup_max_lr", "lr", float(highest))
    steps = file.get("scheduler.params.warmup_num_steps")
    if steps is not None:
        # DeepSpeed replaces 1 by 2, since its logarithmic warm-up cannot have one step.
        samples = max(2, int(steps)) * per_step
        yield TranslatedKey("scheduler.params.warmup_num_steps", f"lr_warmup_{unit}", samples)
    total = file.get("scheduler.params.total_num_steps")
    if total is not None and style == "linear":
        length = int(total) * per_step
        yield TranslatedKey("scheduler.params.total_num_steps", f"lr_decay_{unit}", length)


def problems(config: Config, file: DeepSpeedFile) -> Iterator[Problem]:
    """Find out why a scheduler block cannot be translated, and which flags replace it."""
    if file.get("scheduler") is None:
        return
    kind = file.get("scheduler.type")
    location = file.location("scheduler.type" if kind else "scheduler")
    if kind == "WarmupCosineLR":
        yield Problem(
            "ds-scheduler-inexact", location=location, cosine_flags=_cosine_flags(config, file)
        )
    elif kind not in TRANSLATED:
        yield Problem(
            "ds-scheduler-unsupported",
            location=location,
            kind=kind,
            translated=" and ".join(TRANSLATED),
        )
    else:
        yield from _translation_problems(config, file, kind)


def _translation_problems(config: Config, file: DeepSpeedFile, kind: str) -> Iterator[Problem]:
    key = "scheduler.params.warmup_type"
    if file.get(key) != "linear":
        # DeepSpeed's default is "log".
        given = json.dumps(file.get(key) or "log (the default)")
        yield Problem(
            "ds-warmup-not-linear",
            location=file.location(key if file.get(key) else "scheduler.type"),
            key=key,
            given=given,
        )
    steps = "scheduler.params.warmup_num_steps"
    if file.get(steps) is not None and file.get(steps) <= 0:
        yield file.invalid(steps, "must be positive", "lr_warmup_iters")
    params = file.values["scheduler"].get("params") or {}
    if kind == "WarmupDecayLR" and not params.get("total_num_steps"):
        yield Problem("ds-scheduler-without-total-steps", location=file.location("scheduler.type"))
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(config.schedule, name) is not None:
            yield Problem(
                "ds-scheduler-with-varying-batch",
                name,
                location=file.location("scheduler"),
                flag=option(name),
            )


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
