"""The weights of a universal checkpoint of this program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from megatron_ds.checkpoint.local_files import files_damaged, find_damaged_files
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    CheckpointMetadata,
    find_damage,
    list_checkpoints,
    read_manifest,
    read_run,
    run_folder,
)
from megatron_ds.checkpoint.tensor_reader import LazyTensor
from megatron_ds.checkpoint.universal.folders import FP32, list_universal
from megatron_ds.checkpoint.universal.reader import UniversalStates
from megatron_ds.config.problems import user_error
from megatron_ds.conversion.native import DTYPES, declared_parts, settings_of
from megatron_ds.conversion.source import WeightsSource
from megatron_ds.engine.states.state_reader import MASTER
from megatron_ds.fileio.atomic import FileRecord


def is_own_universal(path: Path) -> bool:
    """Whether a folder is a universal checkpoint, or has some and no others."""
    found = [] if list_checkpoints(path) else list_universal(path)
    return bool(found) and (run_folder(found[0]) / RUN).is_file()


def open_universal(path: Path, warn: Callable[[str], None]) -> WeightsSource:
    """Opens the universal checkpoint that the pointer of a folder names, or the folder itself.

    Raises:
        UserError: If there is none, or it is damaged.
    """
    paths = list_universal(path)
    if not paths:
        raise user_error("universal-missing", folder=path)
    damage = find_damage(paths[0])
    if damage is None:
        files = weights_files(read_run(paths[0]))
        damage = files_damaged(find_damaged_files(paths[0], files))
    if damage is not None:
        raise user_error("checkpoint-damaged", path=paths[0], damage=damage, hint="")
    return universal_source(read_run(paths[0]))


def weights_files(found: CheckpointMetadata) -> dict[str, FileRecord]:
    """The files of the weights; none if the checkpoint has no checksums."""
    if not (found.path / MANIFEST).is_file():
        return {}
    files = read_manifest(found.path)
    return {name: record for name, record in files.items() if Path(name).stem == FP32}


def universal_source(found: CheckpointMetadata) -> WeightsSource:
    """The weights of a universal checkpoint.

    Raises:
        UserError: If it has options or weights unknown to this version.
    """
    states = UniversalStates(found.path, has_optimizer=False)
    tensors = {
        name: LazyTensor(shape, torch.float32, partial(states.read, name, MASTER, range(shape[0])))
        for name, shape in states.shapes.items()
    }
    precision = DTYPES[found.run.layout.precision]
    settings, parts = settings_of(found), declared_parts(found)
    return WeightsSource(found.path, "universal", settings, tensors, precision, parts).checked()
