"""Architectures of public models, as files of settings that --preset names.

The first line of a file has the model's name and its published number of parameters.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
PRESETS = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def path_of(preset: str) -> str:
    """The file of a preset."""
    return str(FOLDER / f"{preset}.yaml")
