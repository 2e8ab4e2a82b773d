"""Settings in a training checkpoint: its selection, the model's options, the tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_ds.checkpoint import metadata, selection
from megatron_ds.checkpoint.files import full_weights, local_files
from megatron_ds.checkpoint.metadata import RUN, TOKENIZER, Checkpoint
from megatron_ds.checkpoint.universal.folders import list_universal
from megatron_ds.config import ModelConfig, MoEConfig, TokenizerConfig
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.tokenizer.stored_files import with_copies

Settings = TypeVar("Settings", ModelConfig, MoEConfig, TokenizerConfig)


def select_native(
    folder: Path, warn: Callable[[str], None], *, checksums: bool = True
) -> Checkpoint:
    """Selects the last undamaged checkpoint of a --save folder, or the folder's own.

    Args:
        folder: A --save folder, or the folder of one checkpoint.
        warn: Called with a line for each newer checkpoint that is damaged.
        checksums: Compare the files with weights with their checksums, and not only names and
            sizes of all files.

    Raises:
        UserError: If there is none.
    """
    if (folder / RUN).is_file():
        listing = selection.CheckpointListing(folder, (folder,))
    else:
        listing = selection.list_folder(folder)
    checkpoint = selection.select_checkpoint(
        listing,
        None,
        partial(_find_damage, checksums=checksums),
        lambda problem: warn(f"WARNING: {problem.render()}"),
    )
    assert checkpoint is not None
    return checkpoint


def find_universal(folder: Path, *, checksums: bool = True) -> Checkpoint:
    """The universal checkpoint that the pointer of a folder names, or the folder's own.

    Raises:
        UserError: If there is none, or it is damaged.
    """
    paths = list_universal(folder)
    if not paths:
        raise user_error("universal-missing", folder=folder)
    if (damage := _find_damage(paths[0], checksums=checksums)) is not None:
        raise user_error("checkpoint-damaged", path=paths[0], damage=damage, hint="")
    return metadata.read_run(paths[0])


def _find_damage(path: Path, *, checksums: bool) -> Problem | None:
    try:
        if (damage := metadata.check_names(path)) is not None or not checksums:
            return damage
        files = full_weights.files_with_weights(metadata.read_run(path))
        return local_files.files_damaged(local_files.find_damaged_files(path, files))
    except OSError as error:
        return metadata.unreadable_checkpoint(error)  # a running training may have removed it


def model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The model's configuration.

    Raises:
        UserError: If the checkpoint has a field unknown to this version.
    """
    return _from_dict(ModelConfig, checkpoint.run.config["model"], checkpoint)


def moe_config(checkpoint: Checkpoint) -> MoEConfig:
    """The model's mixture of experts.

    Raises:
        UserError: If the checkpoint has a field unknown to this version.
    """
    return _from_dict(MoEConfig, checkpoint.run.config.get("moe", {}), checkpoint)


def tokenizer_config(checkpoint: Checkpoint) -> TokenizerConfig:
    """The run's tokenizer configuration, with the files in the checkpoint.

    Raises:
        UserError: If the checkpoint has a field unknown to this version.
    """
    saved = with_copies(checkpoint.run.config["tokenizer"], checkpoint.path / TOKENIZER)
    return _from_dict(TokenizerConfig, saved, checkpoint)


def _from_dict(cls: type[Settings], values: Mapping[str, Any], checkpoint: Checkpoint) -> Settings:
    known = {item.name for item in dataclasses.fields(cls)}
    if unknown := ", ".join(sorted(values.keys() - known)):
        path = checkpoint.path / RUN
        group = cls.__name__
        raise user_error("checkpoint-of-newer-version", path=path, group=group, unknown=unknown)
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return cls(**{**values, **tuples})
