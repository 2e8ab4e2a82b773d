"""Compares two DeepSpeed configurations key by key, with the defaults of absent keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config.deepspeed_file import Json, get, leaves
from megatron_ds.config.problems import raise_if_any
from megatron_ds.engine.ds_config.file import parse_file, translate
from megatron_ds.engine.ds_config.keys import DEFAULTS

FILE = "ds_config.json"
"""What a run writes into the folder of its checkpoints."""


@dataclass(frozen=True)
class Difference:
    """A key that two configurations do not both have with the same value.

    Attributes:
        key: Dotted name.
        values: Its value in each; if absent the default of DeepSpeed, None if that is none.
        given: Whether each has it.
    """

    key: str
    values: tuple[Any, Any]
    given: tuple[bool, bool]

    @property
    def is_effective(self) -> bool:
        """Whether the values differ, and not only whether they are written."""
        return bool(self.values[0] != self.values[1])

    def shown(self, side: int) -> str:
        """One of the values, or that it is absent and which default applies."""
        value = json.dumps(self.values[side])
        if self.given[side]:
            return value
        return f"absent (default {value})" if self.key in DEFAULTS else "absent"


def read(path: str) -> Json:
    """The values of a file, or of the run in a folder, with current names of keys.

    Raises:
        UserError: If it is not a JSON object, or has blocks that are not objects.
    """
    file = parse_file(str(Path(path) / FILE) if Path(path).is_dir() else path)
    translate(file)
    raise_if_any(file.problems)
    return file.values


def differences(first: Json, second: Json) -> list[Difference]:
    """The differences of two configurations, in the order of the first one."""
    sides = [{key: get(side, key) for key in leaves(side)} for side in (first, second)]
    found = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        present = sides[0].get(key) is not None, sides[1].get(key) is not None
        left, right = (
            side[key] if given else DEFAULTS.get(key)
            for side, given in zip(sides, present, strict=True)
        )
        if present[0] != present[1] or left != right:
            found.append(Difference(key, (left, right), present))
    return found
