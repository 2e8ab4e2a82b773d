"""Reads the tables and texts next to the modules of this package."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read_text(module: str, name: str) -> str:
    """The content of a file.

    Args:
        module: `__file__` of the module next to it.
        name: Name of the file.
    """
    return Path(module).with_name(name).read_text(encoding="utf-8")


def read_table(module: str, name: str = "") -> dict[str, Any]:
    """The content of a TOML file, as a rule of the one with the module's name."""
    return tomllib.loads(read_text(module, name or f"{Path(module).stem}.toml"))
