"""The states that continue a run with Adam, of checkpoints of this program and of Megatron.

Owns the names that Megatron gives the settings of the optimizer and of its schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.full_weights import files_with_weights
from megatron_ds.checkpoint.local_files import files_damaged, find_damaged_files
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    CheckpointMetadata,
    read_manifest,
    read_run,
    run_folder,
)
from megatron_ds.checkpoint.tensor_reader import LazyTensor, LazyTensors
from megatron_ds.checkpoint.universal.reader import open_states
from megatron_ds.config.problems import UserError, user_error
from megatron_ds.conversion.megatron.detect import find_checkpoint
from megatron_ds.conversion.megatron.open import open_checkpoint
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.source import TrainingStates, WeightsSource
from megatron_ds.conversion.universal import weights_files
from megatron_ds.engine.states.state_reader import MASTER, FullStates

TABLE = "embedding.word.weight"
ADAM_SETTINGS = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay")


def with_training(source: WeightsSource) -> WeightsSource:
    """A source with the states of the run that saved it.

    Args:
        source: Weights of a checkpoint of this program or of Megatron.

    Raises:
        UserError: If there are no states, or not those of Adam, or files are damaged.
    """
    if (run_folder(source.path) / RUN).is_file():
        rows = source.settings.model.softmax_rows
        training = _of_native(read_run(source.path), rows)
        tensors = training.optimizer[MASTER]
    else:
        training, tensors = _of_megatron(source.path)
    found = dataclasses.replace(source, training=training, tensors=tensors).checked()
    return found.to(source.dtype)


def with_masters(source: WeightsSource) -> WeightsSource:
    """A source with the fp32 master weights, which the checkpoint of a training run has.

    Raises:
        UserError: If files are damaged.
    """
    if source.format != "native" or not (source.path / RUN).is_file():
        return source
    tensors = _full_tensors(_open_verified(read_run(source.path)), MASTER)
    return dataclasses.replace(source, tensors=tensors, precision=torch.float32).checked()


def _open_verified(found: CheckpointMetadata) -> FullStates:
    """The states of a checkpoint whose files with weights are verified already."""
    checked = weights_files(found) if found.is_universal else files_with_weights(found)
    # DeepSpeed writes no manifest.
    files = read_manifest(found.path) if (found.path / MANIFEST).is_file() else {}
    others = {name: each for name, each in files.items() if name not in checked}
    if (damage := files_damaged(find_damaged_files(found.path, others))) is not None:
        raise UserError(damage)
    return open_states(found, has_optimizer=found.run.has_optimizer)


def _full_tensors(saved: FullStates, kind: str) -> LazyTensors:
    """All tensors of a kind in fp32, by canonical name."""

    def read(name: str) -> Tensor:
        return saved.read(name, kind, range(saved.shapes[name][0])).float()

    return {
        name: LazyTensor(shape, torch.float32, partial(read, name))
        for name, shape in saved.shapes.items()
    }


def _of_native(found: CheckpointMetadata, rows: int) -> TrainingStates:
    run, path = found.run, found.path
    if run.layout.optimizer != "adam":
        raise _unconvertible(path, f"the optimizer is {run.layout.optimizer}")
    if not run.has_optimizer:
        raise _unconvertible(path, "it was saved without them")
    saved = _open_verified(found)
    steps = saved.steps(next(iter(saved.shapes)))
    if steps is None:
        raise _unconvertible(path, "the optimizer has not taken a step")

    optimizer = {kind: _full_tensors(saved, kind) for kind in (*MOMENTS, MASTER)}
    settings = {**run.config["optimizer"], **run.config["schedule"]}
    length = run.config["model"]["seq_length"]
    scheduler = _scheduler(settings, run.data_order.global_batch_size, length)
    return TrainingStates(
        optimizer,
        steps=steps,
        iteration=run.state.iteration,
        consumed_samples=run.state.consumed_samples,
        softmax_rows=rows,
        arguments={name: settings[name] for name in (*ADAM_SETTINGS, "min_lr")}
        | {"optimizer": "adam", "seed": run.data_order.seed},
        scheduler=scheduler | {"num_steps": run.state.applied_samples},
    )


def _scheduler(settings: Mapping[str, Any], batch_size: int, seq_length: int) -> dict[str, Any]:
    """Megatron's scheduler, which counts samples.

    Args:
        settings: Options of optimizer and schedule.
        batch_size: Samples of a step.
        seq_length: Tokens of a sample.
    """

    def samples(stem: str) -> int:
        if count := settings.get(f"{stem}_samples"):
            return int(count)
        if count := settings.get(f"{stem}_iters"):
            return int(count) * batch_size
        return (settings.get(f"{stem}_tokens") or 0) // seq_length

    decay, fraction = samples("lr_decay") or samples("train"), settings.get("lr_warmup_fraction")
    is_constant = settings["weight_decay_incr_style"] == "constant"
    start, end = (
        settings["weight_decay"] if is_constant else settings[f"{name}_weight_decay"]
        for name in ("start", "end")
    )
    return {
        "max_lr": settings["lr"],
        "min_lr": settings["min_lr"],
        "lr_warmup_steps": samples("lr_warmup") if fraction is None else int(fraction * decay),
        "lr_decay_steps": decay,
        "lr_decay_style": settings["lr_decay_style"],
        "start_wd": start,
        "end_wd": end,
        "wd_incr_steps": samples("train"),
        "wd_incr_style": settings["weight_decay_incr_style"],
    }


def _of_megatron(path: Path) -> tuple[TrainingStates, LazyTensors]:
    """The states, and the weights with all rows."""
    found = find_checkpoint(path)
    if found is None:
        raise _unconvertible(path, "the folder has weights alone")
    model = open_checkpoint(found)
    if not model.optimizer:
        raise _unconvertible(path, model.unread)
    missing = [name for name in (*ADAM_SETTINGS, "min_lr") if model.arguments.get(name) is None]
    if model.steps is None or model.consumed_samples is None or missing:
        raise _unconvertible(path, "counters or settings of the optimizer are missing")
    weights = model.source.tensors
    training = TrainingStates(
        model.optimizer,
        steps=model.steps,
        iteration=model.iteration,
        consumed_samples=model.consumed_samples,
        softmax_rows=model.softmax_rows or weights[TABLE].shape[0],
        arguments={name: model.arguments[name] for name in (*ADAM_SETTINGS, "min_lr")}
        | {"optimizer": "adam"},
        scheduler=model.scheduler,
    )
    return training, weights


def _unconvertible(path: Path, reason: str) -> UserError:
    return user_error("conversion-without-states", path=path, reason=reason)
