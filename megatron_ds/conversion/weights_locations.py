"""Detects weight-only folders; parses the `format:` prefix of --load. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from megatron_ds.checkpoint.metadata import list_checkpoints
from megatron_ds.conversion.json_files import read_json

NATIVE, HF = "native", "hf"
SETTINGS = "weights.json"
"""File of a native folder of weights with the options of its model."""
HF_CONFIG = "config.json"


def is_weights_folder(path: Path) -> bool:
    """Whether a folder is a native one of weights alone."""
    return (path / SETTINGS).is_file()


def is_hf(path: Path) -> bool:
    """Whether a folder is a model of Hugging Face's transformers."""
    try:
        return "model_type" in read_json(path / HF_CONFIG)
    except (OSError, ValueError, TypeError):
        return False


def has_weights(path: Path) -> bool:
    """Whether a folder has weights alone, and no checkpoints of a run that saves to it."""
    return not list_checkpoints(path) and (is_weights_folder(path) or is_hf(path))
