"""JSON files of other programs, read with limits. Imports no torch."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

LARGEST_FILE = 2**28
"""Bytes of a JSON file; the index of a model of a trillion parameters has a few millions."""


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not JSON, no regular file, as a pipe that never ends, or too large.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is not a regular file")
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE + 1)
    if len(content) > LARGEST_FILE:
        raise ValueError(f"it has more than {LARGEST_FILE} bytes")
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
