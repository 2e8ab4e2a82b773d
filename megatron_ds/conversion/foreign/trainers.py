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
from megatron_ds.conversion.foreign.contents import FolderContents, tensor_names
from megatron_ds.conversion.megatron.detect import detect_megatron
from megatron_ds.conversion.weights_locations import is_weights_folder

AUTO = "auto"
INDEX = ".metadata"
"""Index of a checkpoint of torch.distributed."""
LITGPT_WEIGHTS = "lit_model.pth"
LITGPT_SETTINGS = "model_config.yaml"
NANOTRON_METADATA = "checkpoint_metadata.json"
NANOTRON_SETTINGS = "model_config.json"
OLMO_CORE_STATES = "model_and_optim"
SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = f"{SAFETENSORS}.index.json"
TABLE_OF_TRANSFORMERS = "model.embed_tokens.weight"
STEP = re.compile(r"(?:(?:global_)?step-?)?(\d+)")
"""Names of the folders of steps."""
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


def detect_trainer(
    path: Path, name: str = AUTO, step: int | None = None
) -> TrainerCheckpoint | None:
    """The checkpoint of another trainer in a folder.

    Args:
        path: The folder of a checkpoint, or the one in which a trainer has its steps.
        name: Format that was given for it.
        step: The step to take. None: the last one.

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
            if step is not None and step_of(folder) != step:
                continue
            if (file := find(FolderContents(folder), is_named)) is not None:
                return TrainerCheckpoint(trainer, folder, file)
    return None


def is_own(folder: Path) -> bool:
    """Whether a folder has checkpoints or weights of this program, damaged or not."""
    is_saved = (folder / RUN).is_file() or bool(list_checkpoints(folder))
    return is_saved or is_weights_folder(folder)


def step_of(folder: Path) -> int | None:
    """The step in the name of a folder; None if it has another name."""
    match = STEP.fullmatch(folder.name)
    return None if match is None else int(match[1])


def _steps(path: Path) -> Iterable[Path]:
    """The folders of steps below a folder, the newest first."""
    return [step for step in reversed(FolderContents(path).matching(STEP.pattern)) if step.is_dir()]


def _litgpt(contents: FolderContents, is_named: bool) -> Path | None:
    del is_named
    return contents.first_of(LITGPT_WEIGHTS)


def _torchtitan(contents: FolderContents, is_named: bool) -> Path | None:
    """Weights at the top of a state dict, with Meta's names; or those of transformers without the
    configuration of a model, and again in `sharded`."""
    names = contents.distributed_names
    if "tok_embeddings.weight" in names and any(map(LAYER_OF_TORCHTITAN.fullmatch, names)):
        return contents.path / INDEX
    if contents.has("config.json") or not (is_named or contents.has("sharded")):
        return None
    files = contents.matching(r"model(-\d+-of-\d+)?\.safetensors")[:1]
    names_of_files = (tensor_names(path) for path in files)
    return files[0] if any(TABLE_OF_TRANSFORMERS in names for names in names_of_files) else None


def _olmo_core(contents: FolderContents, is_named: bool) -> Path | None:
    del is_named
    names = contents.distributed_names
    if any(map(LAYER_OF_OLMO_CORE.fullmatch, names)) or any(
        name.startswith("olmo_core.") for name in names
    ):
        return contents.path / INDEX
    if contents.has(f"{OLMO_CORE_STATES}/{INDEX}") and not contents.has("config.yaml"):
        return contents.path / OLMO_CORE_STATES / INDEX
    return None


def _nanotron(contents: FolderContents, is_named: bool) -> Path | None:
    """The folder of a step; latest.txt of the one above names it."""
    del is_named
    is_nanotron = contents.has(NANOTRON_SETTINGS) or contents.has("model")
    return contents.first_of(NANOTRON_METADATA) if is_nanotron else None


def _neox(contents: FolderContents, is_named: bool) -> Path | None:
    """Files of DeepSpeed with the settings of gpt-neox, without which they are Megatron's."""
    del is_named
    checkpoint = detect_megatron(contents.path)
    if checkpoint is None or not any((checkpoint.path / "configs").glob("*.yml")):
        return None
    return checkpoint.path / "configs"


FINDERS: dict[str, Callable[[FolderContents, bool], Path | None]] = {
    "torchtitan": _torchtitan,
    "olmo_core": _olmo_core,
    "litgpt": _litgpt,
    "nanotron": _nanotron,
    "neox": _neox,
}
"""By format, a function that finds the file that shows it in a folder, which may be named as one of
the format."""
