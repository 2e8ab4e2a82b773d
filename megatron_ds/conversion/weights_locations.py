"""Which folders have weights alone, and the names of formats before a folder. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.metadata import list_checkpoints

NATIVE, HF = "native", "hf"
SETTINGS = "weights.json"
"""File of a native folder of weights with the options of its model."""
HF_CONFIG = "config.json"


@dataclass(frozen=True)
class WeightsFolder:
    """A folder with weights alone."""

    path: Path
    kind: str
    """NATIVE or HF."""


def is_weights_folder(path: Path) -> bool:
    """Whether a folder is a native one of weights alone."""
    return (path / SETTINGS).is_file()


def is_hf(path: Path) -> bool:
    """Whether a folder is a model of Hugging Face's transformers."""
    try:
        return "model_type" in json.loads((path / HF_CONFIG).read_bytes())
    except (OSError, ValueError, TypeError):
        return False


def find_weights(path: Path) -> WeightsFolder | None:
    """The weights of a folder; None if it has none, or checkpoints of a run that used it."""
    if list_checkpoints(path):
        return None
    if is_weights_folder(path):
        return WeightsFolder(path, NATIVE)
    return WeightsFolder(path, HF) if is_hf(path) else None
