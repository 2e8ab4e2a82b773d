"""A parsed --deepspeed_config file: values by dotted key, and the line of each."""

from __future__ import annotations

import json
from dataclasses import field
from typing import Any

from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass

Json = dict[str, Any]


@dataclass(frozen=True)
class DeepSpeedFile:
    """A file, whose keys `read_file` replaces by the current ones."""

    path: str
    values: Json
    lines: dict[str, int]
    """Line of each dotted key, by the spelling in the file and the current one."""
    warnings: list[Problem] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def get(self, dotted: str) -> Any:
        """A key's value; None if it is absent or "auto", which leave it to the flags."""
        value = get(self.values, dotted)
        return None if value == "auto" else value

    def location(self, dotted: str) -> str:
        """`ds.json:4`, or the path alone if the line is unknown."""
        line = self.lines.get(dotted)
        return self.path if line is None else f"{self.path}:{line}"

    def describe(self, dotted: str) -> str:
        """A key with value and location: `gradient_clipping 0.5 of ds.json:4`."""
        return f"{dotted} {json.dumps(get(self.values, dotted))} of {self.location(dotted)}"

    def at(self, dotted: str, problem: Problem) -> Problem:
        """The problem with the location of a key before it."""
        return problem.with_prefix(f"{self.location(dotted)}: ")

    def invalid(self, dotted: str, reason: object, *fields: str) -> Problem:
        """The problem of a key whose value is invalid."""
        value = json.dumps(get(self.values, dotted))
        problem = Problem("ds-value-invalid", *fields, key=dotted, value=value, reason=reason)
        return self.at(dotted, problem)


def get(values: Json, dotted: str) -> Any:
    """The value of a dotted key; None if it or an object on the way is absent."""
    parent, last = _parent(values, dotted)
    return parent.get(last)


def has(values: Json, dotted: str) -> bool:
    parent, last = _parent(values, dotted)
    return last in parent


def pop(values: Json, dotted: str) -> Any:
    parent, last = _parent(values, dotted)
    return parent.pop(last, None)


def put(values: Json, dotted: str, value: Any) -> None:
    """Set a dotted key, in new objects where there are none."""
    *above, last = dotted.split(".")
    for part in above:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[last] = value


def leaves(values: Json, prefix: str = "") -> list[str]:
    """The dotted keys of all values that are not objects."""
    keys = []
    for key, value in values.items():
        keys += leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return keys


def _parent(values: Json, dotted: str) -> tuple[Json, str]:
    """The object that may have a dotted key, a new one if it is absent, and the key in it."""
    *above, last = dotted.split(".")
    for part in above:
        value = values.get(part)
        values = value if isinstance(value, dict) else {}
    return values, last
