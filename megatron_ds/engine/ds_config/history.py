"""Defaults of absent keys of DeepSpeed files, version by version.

The facts are in history.toml. Does not know what becomes of a file: see `migrate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.data_files import read_table
from megatron_ds.config.deepspeed_file import DeepSpeedFile, get, has
from megatron_ds.config.problems import user_error
from megatron_ds.engine.ds_config.keys import VERSION

Version = tuple[int, ...]
TABLES = read_table(__file__)
OLDEST = "0.5.0"
REPLACED: dict[str, str] = TABLES["replaced"]
"""Keys that only a migration replaces -> current key."""
OPTIMIZERS: dict[str, dict[str, Any]] = TABLES["optimizers"]
"""Other optimizers -> their `successor`, `effect`: what differs, and `params` of theirs alone."""


@dataclass(frozen=True)
class FormerDefault:
    """A default that has changed, or that megatron_ds does not share with DeepSpeed.

    Attributes:
        key: Dotted name, or a description of what has no key.
        values: Default by the first version that has it, in order.
        here: Value that megatron_ds uses if neither the file nor a flag has the key.
        effect: Effect of the difference.
        when: Conditions on a file, all of which hold if the default concerns it.
        keep: Whether a migration writes the former default.
        flag: Flag that restores it, for what has no key.
    """

    key: str
    values: Mapping[str, Any]
    here: Any
    effect: str
    when: tuple[str, ...] = ()
    keep: bool = False
    flag: str = ""

    def at(self, version: str) -> Any:
        """The default of a version."""
        until = as_version(version)
        return [value for first, value in self.values.items() if as_version(first) <= until][-1]

    @property
    def moved(self) -> str:
        """The version since which DeepSpeed has the value of megatron_ds; "" if it has not."""
        first, value = list(self.values.items())[-1]
        return first if value == self.here else ""

    def concerns(self, file: DeepSpeedFile) -> bool:
        """Whether a file, with current keys, leaves the default in effect."""
        return get(file.values, self.key) is None and all(_holds(file, term) for term in self.when)


FORMER = tuple(
    FormerDefault(**{**one, "when": tuple(one.get("when", ()))}) for one in TABLES["default"]
)


def as_version(text: str) -> Version:
    """`0.9.2` as three numbers, for comparisons; `0.9` is `0.9.0`."""
    numbers = [int(part) for part in text.split(".")]
    return (*numbers, 0)[:3]


def known_version(text: str) -> str:
    """A version such as `0.9.2`; `0.9` is `0.9.0`.

    Raises:
        UserError: If it is none from OLDEST to the supported one.
    """
    text = text.removeprefix("v")
    is_version = re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,2}", text) is not None
    if not is_version or not as_version(OLDEST) <= as_version(text) <= as_version(VERSION):
        raise user_error(
            "unknown-deepspeed-version", "from_version", value=text, oldest=OLDEST, newest=VERSION
        )
    return ".".join(map(str, as_version(text)))


def oldest_version(file: DeepSpeedFile) -> tuple[str, str]:
    """The oldest version that has all keys of a parsed file, and the key that shows it, or ""."""
    for version, keys in reversed(TABLES["since"].items()):
        for key in keys:
            if has(file.values, key):
                return f"{version}.0", key
    return OLDEST, ""


def _holds(file: DeepSpeedFile, condition: str) -> bool:
    """Whether a file fulfills a condition of history.toml."""
    if "|" in condition:
        return any(_holds(file, term) for term in condition.split("|"))
    if condition.startswith("!"):
        return not file.get(condition.removeprefix("!"))
    key, equals, expected = condition.partition("=")
    value = get(file.values, key)
    return str(value).lower() == expected if equals else value not in (None, False, 0, "none")
