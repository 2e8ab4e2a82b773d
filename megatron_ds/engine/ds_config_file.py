"""The user's --deepspeed_config file: parsed, validated and normalized to current key names.

Owns how old spellings are translated, what is dropped with a warning and what is refused. What a
key means for the run is in `ds_config_merge`. Does not import deepspeed.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.engine.ds_keys import (
    BLOCKS,
    DROPPED_IF,
    IGNORED_KEYS,
    OLD_PIN_KEY,
    OLD_SWITCHES,
    REFUSED,
    RENAMED,
    TOP_KEYS,
)
from megatron_ds.engine.ds_values import Json, Kind, as_bool, as_object, get, has, pop, put

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:\n]')


@dataclass(frozen=True)
class DeepSpeedFile:
    """A file with current key names."""

    path: str
    values: Json
    warnings: tuple[Problem, ...] = ()
    problems: tuple[Problem, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line of each dotted key, by the spelling in the file and the current one."""

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
        return f"{dotted} {json.dumps(self.get(dotted))} of {self.location(dotted)}"

    def invalid(self, dotted: str, reason: object, *fields: str) -> Problem:
        """The problem of a key whose value is invalid."""
        return invalid_value(self.location(dotted), dotted, self.get(dotted), reason, *fields)


def read_file(path: str) -> DeepSpeedFile:
    """Read and check a file.

    Raises:
        UserError: If it is not a JSON object.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise _unreadable(f"{path}:{error.lineno}:{error.colno}", error.msg) from error
    except RecursionError:
        raise _unreadable(path, "nested too deeply") from None
    except (OSError, ValueError) as error:  # includes numbers of thousands of digits
        raise _unreadable(path, error) from error
    if not isinstance(values, dict):
        raise _unreadable(path, "not a JSON object")
    return _Normalizer(path, values, _key_lines(text)).normalize()


def file_of(config: Config) -> DeepSpeedFile | None:
    """The DeepSpeed file of a configuration, which `merge_file` has read; None without one.

    Raises:
        UserError: If it was not read before and is not a JSON object.
    """
    path = config.deepspeed.deepspeed_config
    if path is None:
        return None
    file: DeepSpeedFile = config.deepspeed_file or read_file(path)
    return file


def invalid_value(location: str, key: str, value: Any, reason: object, *fields: str) -> Problem:
    """The problem of a key of a file whose value is invalid."""
    return Problem(
        "ds-value-invalid",
        *fields,
        location=location,
        key=key,
        value=json.dumps(value),
        reason=reason,
    )


def _unreadable(location: str, reason: object) -> UserError:
    return user_error("ds-config-unreadable", location=location, reason=reason)


class _Normalizer:
    """Rewrites the values of a file in place and collects warnings and problems."""

    def __init__(self, path: str, values: Json, lines: dict[str, int]) -> None:
        self._path = path
        self._values = values
        self._lines = lines
        self._warnings: list[Problem] = []
        self._problems: list[Problem] = []

    def normalize(self) -> DeepSpeedFile:
        self._drop_inactive_curriculum()
        self._normalize_blocks()
        self._translate_old_keys()
        self._drop_or_refuse_keys()
        self._check_keys_and_values()
        return DeepSpeedFile(
            self._path, self._values, tuple(self._warnings), tuple(self._problems), self._lines
        )

    def _drop_inactive_curriculum(self) -> None:
        # Before all else: the content of a disabled block is not even checked.
        key = "curriculum_learning"
        if get(self._values, key) == "auto":
            pop(self._values, key)
        elif has(self._values, key) and _is_off(get(self._values, key)):
            pop(self._values, key)
            self._dropped(key, "it is off")

    def _normalize_blocks(self) -> None:
        """Drop blocks that are null or not objects, so that the rest is readable."""
        zero = self._values.get("zero_optimization")
        if isinstance(zero, bool):
            self._values["zero_optimization"] = {"stage": int(zero)}
            self._translated("zero_optimization", f'{{"stage": {int(zero)}}}')
        if "bfloat16" in self._values and "bf16" not in self._values:
            self._rename("bfloat16", "bf16")
        for block in BLOCKS:
            value = get(self._values, block)
            if value is None:
                pop(self._values, block)
            else:
                self._check_value(block, as_object, value)

    def _translate_old_keys(self) -> None:
        for old, new in RENAMED.items():
            if has(self._values, old):
                self._rename(old, new)
        pin = pop(self._values, OLD_PIN_KEY)
        is_pin_used = False
        for old, (new, replacement) in OLD_SWITCHES.items():
            value = pop(self._values, old)
            if value is None or not self._check_value(old, as_bool, value):
                continue
            if not value:
                self._dropped(old, "it is off")
                continue
            if isinstance(replacement, dict) and isinstance(pin, bool):
                replacement, is_pin_used = {**replacement, "pin_memory": pin}, True
            self._place(old, new, replacement)
        if is_pin_used:
            self._translated(OLD_PIN_KEY, "pin_memory")
        elif pin is not None:
            self._dropped(OLD_PIN_KEY, "nothing is offloaded")

    def _rename(self, old: str, new: str) -> None:
        self._place(old, new, pop(self._values, old))

    def _place(self, old: str, new: str, value: Any) -> None:
        """Set the current key that replaces an old one, unless it contradicts."""
        present = get(self._values, new)
        agrees = present == value
        if isinstance(present, dict) and isinstance(value, dict):
            agrees = all(present.get(key, one) == one for key, one in value.items())
        if present is not None and not agrees:
            self._problems.append(
                Problem(
                    "ds-old-key-contradicts",
                    location=self._location(old),
                    old=old,
                    new=new,
                    present=json.dumps(present),
                    other_location=self._location(new),
                )
            )
            return
        if present is None:
            put(self._values, new, value)
            children = value if isinstance(value, dict) else ()
            for key in (new, *(f"{new}.{child}" for child in children)):
                self._lines.setdefault(key, self._lines.get(old, 1))
        self._translated(old, f"{new} {json.dumps(value)}")

    def _drop_or_refuse_keys(self) -> None:
        for key, reason in IGNORED_KEYS.items():
            if has(self._values, key):
                value = pop(self._values, key)
                if value == DROPPED_IF.get(key, value):
                    self._dropped(key, reason)
                else:
                    self._refused(key, reason)
        for key, reason in REFUSED.items():
            if has(self._values, key):
                if _is_off(pop(self._values, key)):
                    self._dropped(key, f"it is off, and not supported: {reason}")
                else:
                    self._refused(key, reason)

    def _check_keys_and_values(self) -> None:
        for block, kinds in {"": TOP_KEYS, **BLOCKS}.items():
            if block == "scheduler.params" and not _is_warmup_scheduler(self._values):
                continue  # the scheduler is refused by its type, and has other parameters
            values = (get(self._values, block) or {}) if block else self._values
            for key, value in list(values.items()):
                dotted = f"{block}.{key}" if block else key
                if key not in kinds:
                    self._unknown(dotted, difflib.get_close_matches(key, kinds, n=1))
                elif value not in (None, "auto"):
                    self._check_value(dotted, kinds[key], value)

    def _check_value(self, key: str, kind: Kind, value: Any) -> bool:
        """Whether a value is valid; an invalid one is removed, so that the others are readable."""
        try:
            kind(value)
        except ValueError as error:
            self._problems.append(invalid_value(self._location(key), key, value, error))
            pop(self._values, key)
            return False
        return True

    def _unknown(self, key: str, near: list[str]) -> None:
        hint = f"; did you mean {near[0]!r}?" if near else ""
        self._problems.append(
            Problem("ds-key-unknown", location=self._location(key), key=key, hint=hint)
        )

    def _refused(self, key: str, reason: str) -> None:
        self._problems.append(
            Problem("ds-key-unsupported", location=self._location(key), key=key, reason=reason)
        )

    def _dropped(self, key: str, reason: str) -> None:
        self._warnings.append(
            Problem("ds-key-dropped", location=self._location(key), key=key, reason=reason)
        )

    def _translated(self, key: str, current: str) -> None:
        self._warnings.append(
            Problem("ds-old-key", location=self._location(key), key=key, current=current)
        )

    def _location(self, key: str) -> str:
        line = self._lines.get(key)
        return self._path if line is None else f"{self._path}:{line}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    """Python's parser keeps the last of several equal keys, silently."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"duplicate key {key!r}")
        seen.add(key)
    return dict(pairs)


def _key_lines(text: str) -> dict[str, int]:
    """Line of every dotted key in valid JSON, without keys inside lists."""
    lines: dict[str, int] = {}
    stack: list[str | None] = []  # the key of each open object; None for a list
    key, line, last = "", 1, ""
    for match in TOKEN.finditer(text):
        token = match.group()
        if token == "\n":
            line += 1
        elif token == "{":
            stack.append(key)
        elif token == "[":
            stack.append(None)
        elif token in "}]":
            stack.pop()
        elif token == ":":
            if None not in stack:
                key = json.loads(last)
                prefix = [name for name in stack[1:] if name is not None]
                lines[".".join([*prefix, key])] = line
        elif token != ",":
            last = token
    return lines


def _is_off(value: Any) -> bool:
    """Whether a key or block disables its feature."""
    if not isinstance(value, dict):
        return not value
    if "enabled" in value:
        return value["enabled"] is False
    switches = list(_switches(value))
    return not value or (switches != [] and not any(switches))


def _switches(block: Json) -> Iterator[bool]:
    """Values of all `enabled` keys below a block."""
    for key, value in block.items():
        if key == "enabled":
            yield value is not False
        elif isinstance(value, dict):
            yield from _switches(value)


def _is_warmup_scheduler(values: Json) -> bool:
    return str(get(values, "scheduler.type")).startswith("Warmup")
