"""Writes the files of other programs' checkpoints, as few as show the format."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint

from tests.tables import tables

TREES = tables(__file__)
"""The files of a checkpoint, the code of its message, and the file that the message shows."""


REFUSED = [name for name, tree in TREES.items() if "code" in tree]
"""Cases whose format is not read."""


def write_tree(name: str, folder: Path) -> Path:
    """Writes the files of a case, and returns the folder."""
    for path, content in TREES[name]["files"].items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (how, value) = next(iter(content.items())) if isinstance(content, dict) else ("", content)
        WRITERS[how](target, value)
    return folder


def tensors(names: Any) -> Any:
    """A tensor for each name in a list, and values in dictionaries."""
    if isinstance(names, dict):
        return {name: tensors(value) for name, value in names.items()}
    return {name: torch.zeros(2) for name in names} if isinstance(names, list) else names


def write_distributed(folder: Path, names: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        checkpoint.save(tensors(names), checkpoint_id=folder, no_dist=True)


WRITERS = {
    "": lambda path, text: path.write_text(text),
    "bytes": lambda path, text: path.write_bytes(text.encode()),
    "int32": lambda path, values: path.write_bytes(struct.pack(f"<{len(values)}i", *values)),
    "json": lambda path, value: path.write_text(json.dumps(value)),
    "torch": lambda path, names: torch.save(tensors(names), path),
    "legacy torch": lambda path, names: torch.save(
        tensors(names), path, _use_new_zipfile_serialization=False
    ),
    "safetensors": lambda path, names: save_file(tensors(names), path),
    "distributed": write_distributed,
}
