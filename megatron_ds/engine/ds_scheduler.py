"""The scheduler block of a DeepSpeed file in the words of the flags.

DeepSpeed's schedulers give the rate after each number of steps; those whose course one of ours has
exactly are translated, the others are refused with the flags that come nearest. Knows what the keys
mean, not what flags were given. Source: deepspeed.runtime.lr_schedules
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import Config, flag_of
from megatron_ds.engine.ds_config_file import DeepSpeedFile

TRANSLATED = ("WarmupLR", "WarmupDecayLR")


@dataclass(frozen=True)
class TranslatedKey:
    """A key that says what a field of the configuration says."""

    key: str
    field: str
    value: Any


def translate(config: Config, file: DeepSpeedFile, batch_size: int) -> Iterator[TranslatedKey]:
    """What a scheduler block without problems says of the fields of `config`.

    batch_size: samples of a step. DeepSpeed's own engine takes the first rate twice, since it asks
    the scheduler for the first time after a step; here the rate after n steps is used after n.
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
        # DeepSpeed takes 1 for 2: its logarithmic course cannot have one step.
        samples = max(2, int(steps)) * per_step
        yield TranslatedKey("scheduler.params.warmup_num_steps", f"lr_warmup_{unit}", samples)
    total = file.get("scheduler.params.total_num_steps")
    if total is not None and style == "linear":
        length = int(total) * per_step
        yield TranslatedKey("scheduler.params.total_num_steps", f"lr_decay_{unit}", length)


def problems(config: Config, file: DeepSpeedFile) -> Iterator[str]:
    """Why a scheduler block cannot be what the run does, and which flags to give instead."""
    if file.get("scheduler") is None:
        return
    kind = file.get("scheduler.type")
    place = file.location("scheduler.type" if kind else "scheduler")
    if kind == "WarmupCosineLR":
        yield (
            f"{place}: the scheduler WarmupCosineLR has no exact counterpart (its cosine runs one "
            f"step ahead); leave the block out and give {_cosine_flags(config, file)}"
        )
    elif kind not in TRANSLATED:
        yield (
            f"{place}: the scheduler {kind!r} is not supported: leave the block out and give "
            "--lr-decay-style, --lr-warmup-iters, --lr-decay-iters and --min-lr; those that can be "
            f"translated are {' and '.join(TRANSLATED)}"
        )
    else:
        yield from _translation_problems(config, file, kind)


def _translation_problems(config: Config, file: DeepSpeedFile, kind: str) -> Iterator[str]:
    course = file.get("scheduler.params.warmup_type")
    if course != "linear":
        said = "is absent, which DeepSpeed takes for" if course is None else "is"
        key = "scheduler.params.warmup_type"
        yield (
            f"{file.location(key if course else 'scheduler.type')}: {key} {said} "
            f'"{course or "log"}": the warm-up is linear here; write "warmup_type": "linear"'
        )
    steps = file.get("scheduler.params.warmup_num_steps")
    if steps is not None and steps <= 0:
        key = "scheduler.params.warmup_num_steps"
        yield f"{file.location(key)}: {key} {steps}: must be positive"
    params = file.values["scheduler"].get("params") or {}
    if kind == "WarmupDecayLR" and not params.get("total_num_steps"):
        place = file.location("scheduler.type")
        yield f"{place}: WarmupDecayLR needs scheduler.params.total_num_steps"
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if getattr(config.schedule, name) is not None:
            yield (
                f"{file.location('scheduler')}: a scheduler counts steps, whose size "
                f"{flag_of(name)} changes; leave the block out and give "
                "--lr-warmup-samples and --lr-decay-samples"
            )


def _cosine_flags(config: Config, file: DeepSpeedFile) -> str:
    def param(name: str, default: Any) -> Any:
        value = file.get(f"scheduler.params.{name}")
        return default if value is None else value

    lr = config.optimizer.lr or 0.0
    flags = [
        "--lr-decay-style cosine",
        f"--lr-warmup-iters {param('warmup_num_steps', 1000)}",
        f"--lr-decay-iters {param('total_num_steps', 'N')}",
        f"--lr-warmup-init {lr * param('warmup_min_ratio', 0.0):g}",
        f"--min-lr {lr * param('cos_min_ratio', 0.0001):g}",
    ]
    return " ".join(flags)
