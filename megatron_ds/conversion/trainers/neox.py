"""Checkpoints of gpt-neox, which have DeepSpeed's files and the settings of the run next to them.

Owns only the name of the format: files and settings are those that `megatron` reads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.megatron.detect import detect_megatron
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint

NAME = "neox"


def open_neox(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the checkpoint that the file `latest` of a folder names, or the folder's own.

    Raises:
        UserError: If files are missing or damaged, or the model has parts that ours lacks.
    """
    checkpoint = detect_megatron(path)
    folder = path if checkpoint is None else checkpoint.path
    if not any((folder / "configs").glob("*.yml")):
        raise user_error("megatron-files-missing", folder=folder, names="configs/*.yml")
    return dataclasses.replace(open_megatron(path, options), format=NAME)
