"""The run that saved a checkpoint of gpt-neox.

    global_stepN/mp_rank_00_model_states.pt    iteration, global_samples, lr_scheduler
    global_stepN/configs/*.yml                 settings of the run
    global_stepN/zero_pp_rank_*.pt             Adam's states, which `megatron` reads

The rate of a step follows from the steps that the schedule has counted before it. Facts: gpt-neox
ea7aefd8, `learning_rates.py`, `training.py`, `model/utils.py`, `neox_arguments`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.model_settings import malformed_values
from megatron_ds.conversion.source import ADAM_SETTINGS, SourceCheckpoint, declared_weights
from megatron_ds.conversion.step_settings import StepSettings
from megatron_ds.model.declaration.architecture import is_state
from megatron_ds.parallel.weights import Weight

ADAMS = ("adam", "cpu_adam")
"""Types of optimizers whose states are Adam's, with decoupled weight decay."""
DATA = "gpt-neox orders its samples by an index of its own"


def with_neox_run(source: SourceCheckpoint, values: Mapping[str, Any]) -> SourceCheckpoint:
    """A checkpoint with what the settings of its run state of its steps.

    Args:
        source: The checkpoint.
        values: The settings, with underscores in their names.

    Raises:
        UserError: If they are malformed, or the optimizer is another one than Adam.
    """
    run = source.run
    if run is None:
        return source
    with malformed_values(source.path / "configs"):
        settings = _settings(source, values, run.scheduler)
        if run.consumed_samples and run.iteration:
            batch, remainder = divmod(run.consumed_samples, run.iteration)
            if not remainder:
                options = {**settings.options, "global_batch_size": batch}
                settings = dataclasses.replace(settings, options=options)
        arguments = {
            name: settings.options[name] for name in ADAM_SETTINGS if name in settings.options
        }
    if not source.optimizer:
        settings = StepSettings(data=DATA)
    arguments = {**run.arguments, **arguments}
    run = dataclasses.replace(run, settings=settings, arguments=arguments)
    return dataclasses.replace(source, run=run)


def _settings(
    source: SourceCheckpoint, values: Mapping[str, Any], scheduler: Mapping[str, Any]
) -> StepSettings:
    optimizer = values.get("optimizer") or {}
    name = str(optimizer.get("type", "Adam")).lower()
    if source.optimizer and name not in ADAMS:
        raise user_error("foreign-optimizer-other", path=source.path, states=optimizer["type"])
    params = optimizer.get("params") or {}
    betas = params.get("betas") or (0.9, 0.999)
    peak = float(params.get("lr", values.get("lr", 0.001)))
    decay = float(values.get("weight_decay", 0.1))
    options = {
        "lr": peak,
        "weight_decay": decay,
        "adam_beta1": float(betas[0]),
        "adam_beta2": float(betas[1]),
        "adam_eps": float(params.get("eps", 1e-8)),
        "clip_grad": float(values.get("gradient_clipping", 1.0) or 0.0),
    }
    weights = declared_weights(source.settings.model, source.settings.moe)
    stepped = {name: weight for name, weight in weights.items() if not is_state(weight)}
    settings = StepSettings(
        options=options,
        lr=dict.fromkeys(stepped, peak),
        weight_decay={name: _decay(weight, decay) for name, weight in stepped.items()},
        data=DATA,
    )
    return _with_schedule(settings, scheduler) if scheduler else settings


def _decay(weight: Weight, decay: float) -> float:
    """The weight decay of a weight: norms and biases have none."""
    return decay if len(weight.shape) > 1 else 0.0


def _with_schedule(settings: StepSettings, scheduler: Mapping[str, Any]) -> StepSettings:
    """The settings with the schedule of the learning rate, of the state of AnnealingLR."""
    peak = float(scheduler["start_lr"])
    floor = float(scheduler["min_lr"])
    warmup = float(scheduler["warmup_iter"])
    end = float(scheduler["end_iter"])
    style = str(scheduler["decay_style"])

    def rate(iteration: int) -> float:
        done = iteration - 1
        if warmup > 0 and done <= warmup:
            return peak * max(1, done) / warmup
        progress = (done - warmup) / (end - warmup)
        if style == "linear":
            return max(peak * (1 - progress), floor)
        if style == "cosine":
            return max(floor + (peak - floor) / 2 * (math.cos(math.pi * progress) + 1), floor)
        if style == "exponential":
            return max(peak * math.exp(-0.693 * progress), floor)
        return max(peak, floor)

    flags = ""
    if style in ("cosine", "constant") or (style == "linear" and floor == 0):
        flags = f"--lr-decay-style {style} --lr-decay-iters {end:g} --min-lr {floor:g}"
        if warmup:
            flags += f" --lr-warmup-fraction {warmup / end:g}"
    done = int(scheduler["num_iters"])
    return dataclasses.replace(
        settings,
        rates={done + 1: rate(done + 1)},
        schedule=rate,
        schedule_name=f"{style} decay",
        schedule_flags=flags,
    )
