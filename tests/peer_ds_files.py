"""DeepSpeed files of users: legacy ones written for tests, and examples of other projects.

The latter are read if a copy is next to the repository. Has no tests.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.tables import tables

TABLES = tables(__file__)

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY.parent / "shared" / "data" / "peer_ds_configs"

OWN: dict[str, tuple[Any, str]] = {
    "offload-of-2020": (
        json.loads((REPOSITORY / "examples" / "deepspeed_config.json").read_text()),
        "--micro-batch-size 2 --global-batch-size 4",
    ),
    **TABLES["own"],
}
"""Name -> file and further flags."""

FILES = [path.stem for path in sorted(FOLDER.glob("*.json"))]

PLACEHOLDERS = TABLES["placeholders"]
"""Placeholders of the templates; all others are numbers."""


def fill_placeholders(text: str) -> str:
    """A template with its placeholders outside of quotes replaced."""
    pattern = re.compile(r'"[^"]*"|\b[A-Z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+\b|\bM?G?BSIZE\b')

    def value(match: re.Match[str]) -> str:
        word = match.group()
        return word if word.startswith('"') else PLACEHOLDERS.get(word, "8")

    return pattern.sub(value, text)
