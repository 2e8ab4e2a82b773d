"""The learning rate schedules of OLMo-core, and the flags with which a run here has the same rates.

OLMo-core computes the rate of step N, counted from 1, at position N; here it is computed from what
was applied before the step, position N - 1. Facts: ai2-olmo-core 3.0.0, `optim/scheduler.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

CLASS = "_CLASS_"
DEFAULTS: Mapping[str, Any] = {
    "alpha_f": 0.1,
    "warmup_min_lr": 0.0,
    "decay_min_lr": 0.0,
    "decay_fraction": 0.1,
}


@dataclass(frozen=True)
class Schedule:
    """A schedule of a run."""

    name: str = ""
    """OLMo-core's name of its class."""
    rate: Callable[[int], float] | None = None
    """Learning rate of a step, counted from 1; None if the class is unknown."""
    flags: str = ""
    """Flags of a run here with the same rates; empty if there are none."""


def schedule_of(
    config: Mapping[str, Any] | None, peak: float, last: int | None, step: int, tokens: int
) -> Schedule:
    """The schedule that the settings of a run describe.

    Args:
        config: `train_module.scheduler` of config.json; None: a constant rate.
        peak: Maximum learning rate.
        last: Steps of the entire run; None if they are not known.
        step: Steps so far.
        tokens: Tokens so far.
    """
    if not config:
        return Schedule("constant", lambda step: peak, "--lr-decay-style constant")
    name = str(config.get(CLASS, "")).rpartition(".")[2]
    if config.get("units", "steps") != "steps":
        # Its lengths are in tokens; all steps are taken to have as many as those so far.
        if last is None or not step or tokens % step:
            return Schedule(name)
        per_step = tokens // step
        inner = _schedule(name, config, peak, last * per_step)
        rate = inner.rate
        return Schedule(name, None if rate is None else lambda step: rate(step * per_step))
    return replace(_schedule(name, config, peak, last), name=name)


def _schedule(name: str, config: Mapping[str, Any], peak: float, last: int | None) -> Schedule:
    values = {**DEFAULTS, **{key: value for key, value in config.items() if value is not None}}
    end = values.get("t_max", last)
    if name == "ConstantScheduler":
        return Schedule(name, lambda step: peak, "--lr-decay-style constant")
    make = SCHEDULES.get(name)
    if make is None or (end is None and name != "ConstantWithWarmup"):
        return Schedule(name)
    return make(values, peak, end or 0)


def _warmup(values: Mapping[str, Any], end: int) -> int:
    warmup = values.get("warmup", values.get("warmup_steps"))
    return round(end * values["warmup_fraction"]) if warmup is None else int(warmup)


def _warming(values: Mapping[str, Any], peak: float, warmup: int, step: int) -> float:
    low = float(values["warmup_min_lr"])
    return low + (peak - low) * min(step, warmup) / warmup


def _points(*points: tuple[int, float]) -> str:
    """Flags of rates that are linear between positions."""
    texts = [f"{max(position, 0)}:{factor:.12g}" for position, factor in points]
    return f"--lr-decay-style piecewise --lr-decay-points {' '.join(dict.fromkeys(texts))}"


def _start(values: Mapping[str, Any], peak: float, warmup: int) -> list[tuple[int, float]]:
    """The points of a warmup."""
    if warmup <= 1:
        return []
    return [(0, _warming(values, peak, warmup, 1) / peak), (warmup - 1, 1.0)]


def _constant(values: Mapping[str, Any], peak: float, end: int) -> Schedule:
    warmup = _warmup(values, end)

    def rate(step: int) -> float:
        return _warming(values, peak, warmup, step) if step <= warmup and warmup else peak

    flags = "--lr-decay-style constant"
    return Schedule("", rate, _points(*_start(values, peak, warmup)) if warmup > 1 else flags)


def _wsd(values: Mapping[str, Any], peak: float, end: int) -> Schedule:
    warmup = _warmup(values, end)
    decay = values.get("decay", values.get("decay_steps"))
    decay = round(end * values["decay_fraction"]) if decay is None else int(decay)
    low = float(values["decay_min_lr"])

    def rate(step: int) -> float:
        if step <= warmup and warmup:
            return _warming(values, peak, warmup, step)
        if step >= end - decay and decay:
            return low + (peak - low) * min(end - step, decay) / decay
        return peak

    points = _start(values, peak, warmup)
    if decay:
        points += [(end - decay - 1, 1.0), (end - 1, low / peak)]
    return Schedule("", rate, _points(*points) if points else "--lr-decay-style constant")


def _falling(
    values: Mapping[str, Any], peak: float, end: int, between: Callable[[int], float]
) -> Callable[[int], float]:
    """The rate of a schedule that falls from the end of its warmup to its last step.

    Args:
        values: Settings of the schedule.
        peak: Maximum learning rate.
        end: Step from which on the rate is the least.
        between: The rate of a step from the end of the warmup on, before `end`.
    """
    warmup = _warmup(values, end)

    def rate(step: int) -> float:
        if step < warmup:
            return _warming(values, peak, warmup, step)
        return between(step) if step < end else peak * float(values["alpha_f"])

    return rate


def _linear(values: Mapping[str, Any], peak: float, end: int) -> Schedule:
    warmup = _warmup(values, end)
    low = peak * float(values["alpha_f"])

    def straight(step: int) -> float:
        return peak - (peak - low) * (step - warmup) / (end - warmup)

    rate = _falling(values, peak, end, straight)
    if warmup:
        return Schedule("", rate, _points(*_start(values, peak, warmup), (end - 1, low / peak)))
    first = rate(1) / peak
    return Schedule("", rate, _points((0, first), (end - 1, low / peak)))


def _cosine(values: Mapping[str, Any], peak: float, end: int) -> Schedule:
    warmup = _warmup(values, end)
    low = peak * float(values["alpha_f"])

    def half_wave(step: int) -> float:
        return low + (peak - low) * (1 + math.cos(math.pi * (step - warmup) / (end - warmup))) / 2

    rate = _falling(values, peak, end, half_wave)
    flags = f"--lr-decay-style deepspeed-cosine --lr-decay-iters {end} --min-lr {low:.9g}"
    return Schedule("", rate, f"{flags} --lr-warmup-iters {warmup}" if warmup else flags)


def _inverse_root(values: Mapping[str, Any], peak: float, end: int) -> Schedule:
    warmup = _warmup(values, end)
    low = peak * float(values["alpha_f"])

    def rate(step: int) -> float:
        if step < warmup:
            return _warming(values, peak, warmup, step)
        return low + (peak - low) * math.sqrt(warmup / step)

    return Schedule("", rate)


SCHEDULES: Mapping[str, Callable[[Mapping[str, Any], float, int], Schedule]] = {
    "ConstantWithWarmup": _constant,
    "WSD": _wsd,
    "LinearWithWarmup": _linear,
    "CosWithWarmup": _cosine,
    "InvSqrtWithWarmup": _inverse_root,
}
"""Schedules by the name of their class. Of others, only the rate of the last step is known."""
