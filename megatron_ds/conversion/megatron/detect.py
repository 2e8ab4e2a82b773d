"""Detects checkpoints of Megatron's programs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.metadata import MANIFEST, RUN, run_folder
from megatron_ds.checkpoint.universal.folders import (
    is_universal,
    list_universal,
    universal_iteration,
)
from megatron_ds.conversion.weights_locations import is_trainer_checkpoint

TRACKER = "latest_checkpointed_iteration.txt"
DEEPSPEED_TRACKER = "latest"
LEGACY = "megatron"
TORCH_DIST = "torch_dist"
DEEPSPEED = "megatron-deepspeed"
UNIVERSAL = "universal"


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A folder of one of the formats."""

    path: Path
    kind: str


def has_kind(*kinds: str) -> Callable[[Path], bool]:
    """Gives a function that returns whether a folder has a checkpoint of some kinds."""

    def matches(path: Path) -> bool:
        checkpoint = detect_megatron(path)
        return checkpoint is not None and checkpoint.kind in kinds

    return matches


def detect_megatron(
    folder: Path, step: int | None = None, *, universal: bool = False
) -> MegatronCheckpoint | None:
    """The checkpoint that the pointers of a folder name, or the folder's own.

    Args:
        folder: A --save folder of one of the programs, or one of its checkpoints.
        step: Iteration of the checkpoint instead.
        universal: Prefer a universal checkpoint, which is otherwise the last choice.

    Returns:
        None if the folder has none of these formats.
    """
    if is_trainer_checkpoint(folder):
        return None
    names = [_pointer(folder / DEEPSPEED_TRACKER), _pointer(folder / TRACKER)]
    if step is not None:
        names = [str(step)]
    paths = [
        path
        for name in filter(None, names)
        for path in (folder / _folder_name(name), folder / f"global_step{name}")
    ]
    converted = [path for path in list_universal(folder) if _is_step(path, step)]
    paths = [*converted, *paths] if universal else [*paths, *converted]
    for path in paths:
        if _is_own(path):
            return None
        if (layout := _kind(path)) is not None:
            return MegatronCheckpoint(path, layout)
    layout = None if step is not None or _is_own(folder) else _kind(folder)
    return None if layout is None else MegatronCheckpoint(folder, layout)


def _is_step(path: Path, step: int | None) -> bool:
    return step in (None, universal_iteration(path))


def _pointer(path: Path) -> str:
    try:
        text = path.read_text("utf-8-sig", "replace").strip() if path.is_file() else ""
    except OSError:
        return ""
    return text if re.fullmatch(r"\w{1,100}", text, re.ASCII) else ""


def _folder_name(pointer: str) -> str:
    """The folder that a tracker names: an iteration, `release`, or the name itself."""
    return f"iter_{int(pointer):07d}" if pointer.isdigit() else pointer


def _is_own(path: Path) -> bool:
    """Whether a folder is a checkpoint of this program, damaged or not."""
    return any((run_folder(path) / name).is_file() for name in (RUN, MANIFEST))


def _kind(path: Path) -> str | None:
    if not path.is_dir():
        return None
    if is_universal(path):
        return UNIVERSAL
    if any((path / name).is_file() for name in ("metadata.json", ".metadata")):
        return TORCH_DIST
    if any(folder.is_dir() for folder in path.glob("mp_rank_*")):
        return LEGACY
    return DEEPSPEED if any(path.glob("*_model_states.pt")) else None
