"""Checkpoints of gpt-neox, which have DeepSpeed's files and the settings of the run next to them.

Owns the name of the format and the settings of the run: weights and states are those that
`megatron` reads.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.megatron.detect import detect_megatron
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.open_model import file_in
from megatron_ds.conversion.trainers.runs.neox import with_neox_run

NAME = "neox"


def open_neox(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the checkpoint that the file `latest` of a folder names, or the folder's own.

    Raises:
        UserError: If files are missing, damaged or links to files outside of the folder, or the
            model has parts that ours lacks.
    """
    checkpoint = detect_megatron(path)
    folder = path if checkpoint is None else checkpoint.path
    if not any((folder / "configs").glob("*.yml")):
        raise user_error("megatron-files-missing", folder=folder, names="configs/*.yml")
    for file in (*folder.glob("configs/*.yml"), *folder.glob("*.pt")):
        file_in(folder, str(file.relative_to(folder)))
    source = dataclasses.replace(open_megatron(path, options), format=NAME)
    return with_neox_run(source, _settings(folder))


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of a run, with underscores in their names.

    Raises:
        UserError: If a file is malformed.
    """
    settings: dict[str, Any] = {}
    for path in sorted((folder / "configs").glob("*.yml")):
        try:
            values = yaml.safe_load(file_in(folder, f"configs/{path.name}").read_bytes())
        except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
            raise user_error("foreign-file-unreadable", path=path, error=error) from error
        settings |= {str(key).replace("-", "_"): value for key, value in (values or {}).items()}
    return settings
