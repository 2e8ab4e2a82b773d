"""The run that saved a checkpoint of nanotron.

    FOLDER/checkpoint_metadata.json                         last_train_step, consumed_train_samples
    FOLDER/config.yaml                                      settings of the run
    FOLDER/optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt        of all replicas
    FOLDER/optimizer/optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt   of one, with ZeRO 1
    FOLDER/optimizer/optimizer_config.json                  how ZeRO 1 divides the states

An optimizer's file has `state`, `param_groups` and `names` by the numbers of its weights and, of
runs that accumulate gradients in fp32, the master weights as `gradient_accumulator`. The rate `lr`
is that of the next step. With ZeRO 1 each replica has some of the elements of every weight. Facts:
nanotron 0.4 and its source of April 2026, `serialize/optimizer.py`, `optim/zero.py`, `helpers.py`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.foreign.trainers import NANOTRON_METADATA
from megatron_ds.conversion.model_settings import malformed_values, read_json_object
from megatron_ds.conversion.safe_unpickle import read_foreign
from megatron_ds.conversion.source import ReadOptions, SavedRun, SourceCheckpoint, declared_weights
from megatron_ds.conversion.step_settings import StepSettings
from megatron_ds.conversion.trainers.layout import TrainerNames, joined, layout_of
from megatron_ds.conversion.trainers.nanotron_files import ShardedTensor
from megatron_ds.conversion.trainers.open_model import file_in
from megatron_ds.conversion.trainers.runs.adam_states import (
    STEP,
    TheirAdam,
    adam_of_run,
    with_run,
)
from megatron_ds.engine.states.state_reader import MASTER, TensorReader

FOLDER = "optimizer"
CONFIG = f"{FOLDER}/optimizer_config.json"
SETTINGS = "config.yaml"
LARGEST_SETTINGS = 2**20
"""Bytes of config.yaml."""
FILE = re.compile(
    r"optimizer_pp-(\d+)-of-(\d+)(?:_dp-(\d+)-of-(\d+))?_tp-(\d+)-of-(\d+)_exp-(\d+)-of-(\d+)\.pt"
)
ACCUMULATOR = "gradient_accumulator"


def _linear(progress: float) -> float:
    return 1 - progress


def _cosine(progress: float) -> float:
    return (1 + math.cos(math.pi * progress)) / 2


def _minus_sqrt(progress: float) -> float:
    return 1 - math.sqrt(progress)


DECAYS: dict[str, tuple[str, Callable[[float], float]]] = {
    "linear": ("linear", _linear),
    "cosine": ("cosine", _cosine),
    "1-sqrt": ("minus_sqrt", _minus_sqrt),
}
"""Our name of a decay, and the factor of the rate above the least one."""
DATA = "nanotron's sampler has its own order of the samples"


def with_nanotron_run(
    source: SourceCheckpoint,
    sharded: Mapping[str, ShardedTensor],
    names: TrainerNames,
    options: ReadOptions,
) -> SourceCheckpoint:
    """A model with the run that trained it, as far as the files have it.

    Args:
        source: The model, whose path is the folder of the step.
        sharded: Its weights by nanotron's names.
        names: Names of its weights.
        options: What is read.

    Raises:
        UserError: If files are damaged or missing, or the optimizer is another one than Adam.
    """
    if not (options.optimizer or options.run):
        return source
    path = source.path
    file = file_in(path, NANOTRON_METADATA)
    files = _files(path) if options.optimizer else {}
    with malformed_values(file):
        recorded = read_json_object(file)
        if "metas" not in recorded and not files:
            return source  # weights that no run has saved
        metas = recorded["metas"]
        step = int(metas["last_train_step"])
        samples = int(metas["consumed_train_samples"])
    if not files:
        run = SavedRun(step, samples, None, None, None, settings=StepSettings(data=DATA))
        return dataclasses.replace(source, run=run, unread="it has no optimizer states")
    theirs, masters = _read(path, files, sharded)
    adam = adam_of_run(path, source.settings, names, theirs)
    if masters and source.dtype.itemsize < 4:
        weights = declared_weights(source.settings.model, source.settings.moe)
        joined_masters = {
            name: joined(pieces, [masters[piece.name] for piece in pieces], weights[name])
            for name, pieces in layout_of(source.settings, names).items()
        }
        adam = dataclasses.replace(adam, moments={**adam.moments, MASTER: joined_masters})
    rates = {} if adam.rate is None else {step + 1: adam.rate}
    settings = dataclasses.replace(_with_config(path, adam.settings), rates=rates, data=DATA)
    run = SavedRun(step, samples, None, adam.steps, None, settings=settings)
    return with_run(source, adam, run)


def _files(path: Path) -> dict[tuple[int, int, int], Path]:
    """The files of the optimizer by pipeline stage, tensor-parallel rank and replica.

    Raises:
        UserError: If some are missing.
    """
    files: dict[tuple[int, int, int], Path] = {}
    sizes = (1, 1, 1)
    for file in sorted((path / FOLDER).glob("optimizer_*.pt")):
        match = FILE.fullmatch(file.name)
        if match is None:
            raise user_error("foreign-tensors-unknown", path=path, names=file.name)
        stage, stages, replica, replicas, rank, ranks, *_ = (
            int(text or 0) for text in match.groups()
        )
        files[stage, rank, replica] = file_in(path, f"{FOLDER}/{file.name}")
        sizes = (stages, ranks, max(replicas, 1))
    missing = {*itertools.product(*map(range, sizes))} - files.keys() if files else set()
    if missing:
        stage, rank, replica = min(missing)
        name = f"{FOLDER}/optimizer_pp-{stage}, tp-{rank}, dp-{replica}"
        raise user_error("checkpoint-file-missing", name=path / name)
    return files


Flat = dict[str, dict[int, dict[str, dict[int, Tensor]]]]
"""States by weight, tensor-parallel rank, kind and replica."""


def _read(
    path: Path, files: Mapping[tuple[int, int, int], Path], sharded: Mapping[str, ShardedTensor]
) -> tuple[TheirAdam, dict[str, TensorReader]]:
    """The optimizer, and master weights by name if there are some."""
    states: Flat = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    groups: dict[str, Mapping[str, Any]] = {}
    steps: dict[str, int] = {}
    for (_, rank, replica), file in sorted(files.items()):
        with malformed_values(file):
            loaded = read_foreign(file)
            names = {index: _name(name) for index, name in loaded["names"].items()}
            for group in loaded["param_groups"]:
                members = [index for index in group["params"] if index in names]
                groups |= {names[index]: group for index in members}
            for index, state in loaded["state"].items():
                name = names[index]
                for key, value in state.items():
                    if key == STEP:
                        steps[name] = int(value)
                    else:
                        states[name][rank][key][replica] = value
            for name, value in loaded.get(ACCUMULATOR, {}).items():
                states[_name(name)][rank][MASTER][replica] = value
    kinds: dict[str, dict[str, TensorReader]] = defaultdict(dict)
    for name, by_rank in states.items():
        weight = sharded.get(name)
        for key in {key for by_key in by_rank.values() for key in by_key}:
            ranks = {rank: by_key[key] for rank, by_key in by_rank.items() if key in by_key}
            kinds[name][key] = _joined(path, name, key, ranks, weight)
    masters = {name: by_kind.pop(MASTER) for name, by_kind in kinds.items() if MASTER in by_kind}
    return TheirAdam(kinds, groups, steps), masters


def _name(name: str) -> str:
    """The name of a weight without the start that data parallelism adds."""
    return name.removeprefix("module.")


def _joined(
    path: Path,
    name: str,
    key: str,
    ranks: Mapping[int, Mapping[int, Tensor]],
    weight: ShardedTensor | None,
) -> TensorReader:
    """A state of a weight, of those of ranks and replicas."""
    if weight is None:  # it is reported with the names of all
        return TensorReader.of(next(iter(next(iter(ranks.values())).values())))
    shards = {}
    for rank in weight.shards:
        shape = weight.shards[rank].shape
        parts = [value for _, value in sorted(ranks.get(rank, {}).items())]
        if sum(part.numel() for part in parts) != math.prod(shape):
            names = f"{key} of {name} of tp-rank-{rank}"
            raise user_error("foreign-states-missing", path=path, names=names)
        if len(parts) == 1 and parts[0].shape == shape:
            shards[rank] = TensorReader.of(parts[0])
        else:
            load = partial(_flat, parts, shape)
            shards[rank] = TensorReader.full(shape, parts[0].dtype, load)
    return weight.joined(shards)


def _flat(parts: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    return torch.cat([part.flatten() for part in parts]).view(shape)


def _with_config(path: Path, settings: StepSettings) -> StepSettings:
    """The settings with those in config.yaml, if it is there."""
    if not (path / SETTINGS).is_file():
        return settings
    file = file_in(path, SETTINGS)
    try:
        with file.open("rb") as opened:
            values = yaml.safe_load(opened.read(LARGEST_SETTINGS))
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise user_error("foreign-file-unreadable", path=file, error=error) from error
    with malformed_values(file):
        optimizer = values["optimizer"]
        options = dict(settings.options)
        options["clip_grad"] = float(optimizer.get("clip_grad") or 0.0)
        tokens = values["tokens"]
        sizes = (tokens["micro_batch_size"], tokens["batch_accumulation_per_replica"])
        options["global_batch_size"] = math.prod(sizes) * int(values["parallelism"]["dp"])
        return _with_schedule(
            dataclasses.replace(settings, options=options),
            optimizer["learning_rate_scheduler"],
            int(tokens["train_steps"]),
        )


def _with_schedule(
    settings: StepSettings, scheduler: Mapping[str, Any], steps: int
) -> StepSettings:
    """The settings with the schedule of the learning rate."""
    peak = float(scheduler["learning_rate"])
    floor = scheduler.get("min_decay_lr")
    floor = peak if floor is None else float(floor)
    style = scheduler.get("lr_decay_style") or "linear"
    warmup = int(scheduler.get("lr_warmup_steps") or 0)
    is_linear = (scheduler.get("lr_warmup_style") or "linear") == "linear"
    start = scheduler.get("lr_decay_starting_step")
    start = warmup if start is None else int(start)
    length = scheduler.get("lr_decay_steps")
    length = steps - warmup if length is None else int(length)
    if style not in DECAYS:
        return dataclasses.replace(settings, schedule_name=f"{style} decay")
    ours, factor = DECAYS[style]

    def rate(iteration: int) -> float:
        done = iteration - 1
        if done <= warmup and warmup:
            return peak * done / warmup if is_linear else peak
        if done < start:
            return peak
        if done < start + length:
            return floor + (peak - floor) * factor((done - start) / length)
        return floor

    flags = f"--lr-decay-iters {start + length} --min-lr {floor:g}"
    if warmup and is_linear:
        flags += f" --lr-warmup-iters {warmup}"
    if start == (warmup if is_linear else 0):
        flags += f" --lr-decay-style {ours}"
    else:
        flags += f" --lr-decay-style WSD --lr-wsd-decay-style {ours} --lr-wsd-decay-iters {length}"
    return dataclasses.replace(
        settings, schedule=rate, schedule_name=f"{style} decay", schedule_flags=flags
    )
