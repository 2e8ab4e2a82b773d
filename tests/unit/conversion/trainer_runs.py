"""Writes runs of torchtitan and OLMo-core with the names and forms of their own files."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save

from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.source import SourceCheckpoint, declared_weights
from megatron_ds.conversion.trainers import olmo_core, torchtitan
from megatron_ds.conversion.trainers.layout import TrainerNames, layout_of, their_tensors
from megatron_ds.conversion.trainers.write_distributed import model_of
from megatron_ds.engine.states.state_reader import MASTER

State = dict[str, Any]
Change = Callable[[State], None]


def _nothing(state: State) -> None:
    """Leaves a run as it is."""


def group_of(name: str, lr: float, **changes: Any) -> State:
    """Settings of torch's AdamW for a weight."""
    del name
    group = {"lr": lr, "initial_lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    plain = {"amsgrad": False, "maximize": False, "foreach": None, "fused": None}
    return {**group, **plain, "decoupled_weight_decay": True, **changes}


def states_of(source: SourceCheckpoint, names: TrainerNames) -> dict[str, dict[str, Tensor]]:
    """A trainer's weights and moments by kind, "" for weights, and name."""
    layout = layout_of(source.settings, names)
    declared = declared_weights(source.settings.model, source.settings.moe)
    weights = {**source.tensors, **source.optimizer.get(MASTER, {})}
    tables = {"": weights, **{key: source.optimizer[key] for key in MOMENTS}}
    return {
        key: {
            name: reader.read().clone()
            for name, reader in their_tensors(layout, table, declared).items()
        }
        for key, table in tables.items()
    }


def write_torchtitan(
    source: SourceCheckpoint,
    folder: Path,
    *,
    step: int = 3,
    steps: int | None = None,
    tokens: int = 96,
    lr: float = 1e-2,
    change: Change = _nothing,
    group: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `step-N`, with the states of queries, keys and values as those of one parameter.

    Args:
        source: Weights and moments.
        folder: The folder of checkpoints.
        step: Steps of the trainer.
        steps: Steps of the optimizer; None: as many.
        tokens: Tokens that a data-parallel rank has read.
        lr: Learning rate of the next step.
        change: Changes the state dict before it is written.
        group: Settings of the optimizer that differ from torchtitan's defaults.
    """
    names = torchtitan.NAMES
    tables = states_of(source, names)
    optimizer: State = {}
    for name in _fused(tables[""], source):
        for key in MOMENTS:
            optimizer[f"state.{name}.{key}"] = _fused(tables[key], source)[name]
        optimizer[f"state.{name}.step"] = torch.tensor(float(step if steps is None else steps))
        for setting, value in group_of(name, lr, **(group or {})).items():
            optimizer[f"param_groups.{name}.{setting}"] = value
    state: State = {
        **tables[""],
        "optimizer": optimizer,
        "lr_scheduler": {"last_epoch": step},
        "train_state": {"step": step, "ntokens_seen": tokens},
        "dataloader": {"dp_rank_0": pickle.dumps({"position": step}), "world_size": 1},
    }
    change(state)
    return _write(state, folder / f"step-{step}")


def _fused(tensors: Mapping[str, Tensor], source: SourceCheckpoint) -> dict[str, Tensor]:
    """The tensors by parameter: those of queries, keys and values are one, by groups."""
    model = source.settings.model
    groups = model.kv_heads
    fused = {}
    for name, value in tensors.items():
        if ".wq." in name:
            parts = [tensors[name.replace(".wq.", f".{part}.")] for part in ("wq", "wk", "wv")]
            rows = [part.unflatten(0, (groups, -1)) for part in parts]
            fused[name.replace(".wq.", ".wqkv.")] = torch.cat(rows, 1).flatten(0, 1)
        elif ".wk." not in name and ".wv." not in name:
            fused[name] = value
    return fused


def write_olmo_core(
    source: SourceCheckpoint,
    folder: Path,
    *,
    step: int = 3,
    steps: int | None = None,
    tokens: int | None = None,
    batch: int = 4,
    lr: float = 1e-2,
    change: Change = _nothing,
    module: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    group: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `stepN` with a group of the embeddings, which do not decay, and one of the others.

    Args:
        source: Weights and moments.
        folder: The folder of checkpoints.
        step: Steps of the trainer.
        steps: Steps of the optimizer; None: as many.
        tokens: Tokens that were read; None: those of the steps.
        batch: Sequences of a step.
        lr: Learning rate of the last step.
        change: Changes the state dict before it is written.
        module: Settings of the train module that differ.
        trainer: Values of the trainer's state that differ.
        group: Settings of the optimizer that differ from torch's defaults.
    """
    model = source.settings.model
    length = model.seq_length
    values = model_of(model)
    names = olmo_core.names_of(values, model.norm_position)
    tables = states_of(source, names)
    states = {
        name: {
            **{key: tables[key][name] for key in MOMENTS},
            "step": torch.tensor(float(step if steps is None else steps)),
        }
        for name in tables[""]
    }
    table = ["embeddings.weight"]
    others = [name for name in states if name not in table]
    plain = {**group_of("", lr), **(group or {})}
    groups = [{**plain, "params": others}, {**plain, "params": table, "weight_decay": 0.0}]
    state: State = {"model": tables[""], "optim": {"state": states, "param_groups": groups}}
    change(state)
    path = folder / f"step{step}"
    _write(state, path / "model_and_optim")
    settings = {
        "optim": {"_CLASS_": "olmo_core.optim.adamw.AdamWConfig", "lr": 1e-2},
        "scheduler": {"_CLASS_": "olmo_core.optim.scheduler.ConstantScheduler"},
        "max_grad_norm": 0.5,
        "max_sequence_length": length,
        **(module or {}),
    }
    run = {
        "model": values,
        "train_module": settings,
        "data_loader": {"global_batch_size": batch * length},
    }
    (path / "config.json").write_text(json.dumps(run), encoding="utf-8")
    counters: State = {
        "global_step": step,
        "global_train_tokens_seen": step * batch * length if tokens is None else tokens,
        "max_steps": 20,
        "data_loader": {"batches_processed": step, "epoch": 1},
        "rng": {"numpy": numpy.random.get_state()},
        **(trainer or {}),
    }
    (path / "train").mkdir()
    torch.save(counters, path / "train" / "rank0.pt")
    return path


def _write(state: State, folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):  # there is no process group
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder
