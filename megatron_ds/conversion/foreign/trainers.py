"""Recognizes checkpoints of other trainers that are read, and finds the one in a folder.

Owns the files by which a trainer is recognized, and which step of several is taken: the one that
the trainer itself would continue. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.metadata import RUN, list_checkpoints
from megatron_ds.config.options.checkpoint import TRAINERS
from megatron_ds.conversion.foreign.contents import FolderContents
from megatron_ds.conversion.weights_locations import is_weights_folder

AUTO = "auto"
INDEX = ".metadata"
"""Index of a checkpoint of torch.distributed."""
LITGPT_WEIGHTS = "lit_model.pth"
LITGPT_SETTINGS = "model_config.yaml"
LAYER_OF_TORCHTITAN = re.compile(r"layers\.\d+\.(attention|feed_forward|moe)\..+")
LAYER_OF_OLMO_CORE = re.compile(r"model\.blocks\.\d+\..+")


@dataclass(frozen=True)
class TrainerCheckpoint:
    """A checkpoint of another trainer."""

    name: str
    """Format of --load, one of `TRAINERS`."""
    path: Path
    """The folder of the checkpoint itself, not one above it."""
    file: Path
    """The file or folder that shows the format."""


def detect_trainer(path: Path, name: str = AUTO) -> TrainerCheckpoint | None:
    """The checkpoint of another trainer in a folder.

    Args:
        path: The folder of a checkpoint, or the one in which a trainer has its steps.
        name: Format that was given for it.

    Returns:
        None if the folder has none of the format, or checkpoints of this program or a model of
        transformers, unless the format is given.
    """
    is_named = name in TRAINERS
    if not path.is_dir() or (name != AUTO and not is_named):
        return None
    if not is_named and (is_own(path) or FolderContents(path).is_model_of_transformers):
        return None
    finders = FINDERS if name == AUTO else {name: FINDERS[name]}
    for trainer, find in finders.items():
        for folder in (path, *_steps(path)):
            if (file := find(FolderContents(folder))) is not None:
                return TrainerCheckpoint(trainer, folder, file)
    return None


def is_own(folder: Path) -> bool:
    """Whether a folder has checkpoints or weights of this program, damaged or not."""
    is_saved = (folder / RUN).is_file() or bool(list_checkpoints(folder))
    return is_saved or is_weights_folder(folder)


def _steps(path: Path) -> Iterable[Path]:
    """The folders of steps below a folder, the newest first."""
    return [step for step in reversed(FolderContents(path).matching(r"step-?\d+")) if step.is_dir()]


def _litgpt(contents: FolderContents) -> Path | None:
    return contents.first_of(LITGPT_WEIGHTS)


FINDERS: dict[str, Callable[[FolderContents], Path | None]] = {
    "litgpt": _litgpt,
}
"""By format, a function that finds the file that shows it."""
