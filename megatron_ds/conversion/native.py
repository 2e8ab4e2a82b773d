"""Checkpoints of this program: of training runs, and their universal ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.files.full_weights import files_with_weights, lazy_full_weights
from megatron_ds.checkpoint.files.local_files import files_damaged, find_damaged_files
from megatron_ds.checkpoint.files.native_settings import (
    find_universal,
    model_config,
    moe_config,
    select_native,
    tokenizer_config,
)
from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    Checkpoint,
    list_checkpoints,
    read_manifest,
    run_folder,
)
from megatron_ds.checkpoint.universal.folders import list_universal
from megatron_ds.checkpoint.universal.reader import open_states
from megatron_ds.config.options.optimizer_specs import ADAM, is_bound_to_layout
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values
from megatron_ds.conversion.published import Publication
from megatron_ds.conversion.source import (
    ADAM_SETTINGS,
    READ_DEFAULTS,
    ReadOptions,
    SavedRun,
    SourceCheckpoint,
    WriteOptions,
    declared_weights,
)
from megatron_ds.conversion.weights_locations import is_trainer_checkpoint
from megatron_ds.engine.states.state_reader import (
    MASTER,
    Columns,
    StateReader,
    TensorReader,
    TensorReaders,
)
from megatron_ds.model.declaration.architecture import is_state

UNREADABLE = "checkpoint-states-unreadable"
"""Code of the problem that the contents of files contradict run.json, as in a manipulated
checkpoint."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Data types by name of the precision that --fp16 and --bf16 select."""


def is_native(path: Path) -> bool:
    """Whether a folder is a checkpoint, or a --save folder that has one."""
    if is_trainer_checkpoint(path):
        return False
    return (path / RUN).is_file() or bool(list_checkpoints(path))


def is_own_universal(path: Path) -> bool:
    """Whether a folder is a universal checkpoint, or has some and no others."""
    folders = [] if list_checkpoints(path) else list_universal(path)
    return bool(folders) and (run_folder(folders[0]) / RUN).is_file()


def open_native(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the last undamaged checkpoint of a --save folder, or the folder's own.

    Raises:
        UserError: If there is none.
    """
    return source_of(select_native(path, options.warn, checksums=options.checksums), options)


def open_universal(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the universal checkpoint that the pointer of a folder names, or the folder itself.

    Raises:
        UserError: If there is none, or it is damaged.
    """
    return source_of(find_universal(path, checksums=options.checksums), options)


def write_universal(
    source: SourceCheckpoint, folder: Path, options: WriteOptions, on_tensor: OnTensor
) -> None:
    """Writes the universal checkpoint of a checkpoint of this program.

    Raises:
        UserError: If the source is another one, or damaged, or the folder has files already.
        OSError: If the disk fails.
    """
    # It imports DeepSpeed, without which checkpoints are read and text is generated.
    from megatron_ds.checkpoint.universal.writer import convert_checkpoint, open_verified

    convert_checkpoint(open_verified(source.path), folder, on_tensor)


def source_of(checkpoint: Checkpoint, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """The contents of a checkpoint.

    Raises:
        UserError: If it has options or weights unknown to this version, or damaged states.
    """
    run = checkpoint.run
    path = checkpoint.path
    is_universal = checkpoint.is_universal
    has_masters = options.masters and not is_universal  # whose weights are the masters
    with malformed_values(path, UNREADABLE):
        source = SourceCheckpoint(
            path,
            "universal" if is_universal else "native",
            settings_of(checkpoint),
            lazy_full_weights(checkpoint),
            precision=DTYPES[run.layout.precision],
            parts={name: shard.parts for name, shard in run.shards.items() if shard.parts},
            native=checkpoint,
        ).checked()
        if options.checksums and (options.optimizer or has_masters):
            _verify_optimizer(checkpoint)
        if options.optimizer:
            return _with_states(source, checkpoint)
        if has_masters:
            tensors = _tensors_of(open_states(checkpoint, has_optimizer=False), path, MASTER)
            masters = dataclasses.replace(source, tensors=tensors, precision=torch.float32)
            return masters.checked()
    return source


def settings_of(checkpoint: Checkpoint) -> ModelSettings:
    """The options of a checkpoint's model.

    Raises:
        UserError: If it has options unknown to this version, or layers of a program.
    """
    if layer := checkpoint.run.custom_parts.get("layer"):
        raise user_error("checkpoint-with-own-layer", path=checkpoint.path, layer=layer)
    fingerprint = checkpoint.run.tokenizer
    settings = ModelSettings.of(
        model_config(checkpoint),
        moe_config(checkpoint),
        tokenizer_config(checkpoint),
        None if fingerprint is None else fingerprint.eod,
    )
    with malformed_values(checkpoint.path, UNREADABLE):
        published = dataclasses.replace(settings, published=checkpoint.run.published)
        publication = Publication.of(published)
        return settings if publication is None else publication.applied(settings)


def _verify_optimizer(checkpoint: Checkpoint) -> None:
    """Compares the files without weights with their checksums."""
    checked = files_with_weights(checkpoint)
    # DeepSpeed writes no manifest.
    has_checksums = (checkpoint.path / MANIFEST).is_file()
    files = read_manifest(checkpoint.path) if has_checksums else {}
    others = {name: record for name, record in files.items() if name not in checked}
    if (damage := files_damaged(find_damaged_files(checkpoint.path, others))) is not None:
        raise UserError(damage)


def _with_states(source: SourceCheckpoint, checkpoint: Checkpoint) -> SourceCheckpoint:
    """A source with the optimizer's states, and what is known of the run."""
    run = checkpoint.run
    path = checkpoint.path
    optimizer = run.layout.optimizer
    is_unread = run.has_optimizer and is_bound_to_layout(optimizer)
    states = open_states(checkpoint, has_optimizer=run.has_optimizer and not is_unread)
    kinds = dict.fromkeys(key for name in states.shapes for key in states.state_names(name))
    steps = [states.steps(name) for name in states.shapes]
    numbers = sorted({step for step in steps if step is not None})
    scalars: dict[str, Any] = {"steps": numbers} if len(numbers) > 1 else {}
    if (scaler := states.loss_scaler) is not None:
        scalars["loss_scale"] = float(scaler.cur_scale)
    unread = ""
    if optimizer != ADAM.checkpoint_name:
        unread = f"the optimizer is {optimizer}"
    elif not run.has_optimizer:
        unread = "it was saved without them"
    elif steps[0] is None:
        unread = "the optimizer has not taken a step"
    settings = {**run.config["optimizer"], **run.config["schedule"]}
    length = run.config["model"]["seq_length"]
    scheduler = {} if unread else _scheduler(settings, run.data_order.global_batch_size, length)
    declared = declared_weights(source.settings.model, source.settings.moe)
    masters = _tensors_of(states, path, MASTER)
    masters = {name: step for name, step in masters.items() if not is_state(declared[name])}
    return dataclasses.replace(
        source,
        optimizer={MASTER: masters, **{key: _tensors_of(states, path, key) for key in kinds}},
        unread=unread,
        notes=(Problem("checkpoint-8-bit-moments-unread", path=path),) if is_unread else (),
        run=SavedRun(
            run.state.iteration,
            run.state.consumed_samples,
            run.state.applied_samples,
            steps[0],
            softmax_rows=source.settings.model.softmax_rows,
            arguments={name: settings[name] for name in ADAM_SETTINGS if name in settings}
            | {"optimizer": optimizer, "seed": run.data_order.seed},
            scheduler=scheduler | {"num_steps": run.state.applied_samples},
            scalars=scalars,
        ),
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

    decay = samples("lr_decay") or samples("train")
    fraction = settings.get("lr_warmup_fraction")
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


def _tensors_of(states: StateReader, path: Path, key: str) -> TensorReaders:
    """All tensors of a kind, by canonical name."""

    def read(tensor: TensorReader, rows: range, columns: Columns | None) -> Tensor:
        with malformed_values(path, UNREADABLE):
            return tensor.load(rows, columns)

    names = [name for name in states.shapes if key == MASTER or key in states.state_names(name)]
    tensors = {name: states.tensor(name, key) for name in names}
    return {
        name: dataclasses.replace(item, load=partial(read, item)) for name, item in tensors.items()
    }
