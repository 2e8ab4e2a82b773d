"""config.json of Hugging Face models: what each key means for the model's options, and back.

A family of models is described by `Row`s; each reads some keys and writes them. A key that asks for
a part that the model does not have is noted in `ConfigValues.lacking`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.problems import UserError, user_error

REQUIRED = object()
"""Default of a key that every config.json has."""
Fields = dict[str, Any]
"""Values by field of `ModelConfig` or `MoEConfig`."""
EXPERT_FIELDS = {item.name for item in dataclasses.fields(MoEConfig)}
FULL = "full_attention"
"""Type of a layer that attends to all earlier tokens."""
WINDOWED = "sliding_attention"
"""Type of a layer with a window."""
OLDER_TYPES = {"attention": FULL}
FIELD_DEFAULTS = {
    item.name: item.default for cls in (ModelConfig, MoEConfig) for item in dataclasses.fields(cls)
}


@dataclass(frozen=True)
class ConfigValues:
    """The values of one config.json."""

    path: Path
    values: Mapping[str, Any]
    lacking: list[str] = field(default_factory=list)
    """Parts of the model that ours does not have, each with its key and value."""
    used: set[str] = field(default_factory=set)
    """Keys that were read, whether they are there or not."""

    def get(self, keys: str, default: Any = REQUIRED) -> Any:
        """The value of the first of several keys that is present.

        Raises:
            UserError: If no key is present and no default is given.
        """
        self.used.update(keys.split())
        for key in keys.split():
            if key in self.values:
                return self.values[key]
        if default is REQUIRED:
            raise user_error("hf-config-key-missing", path=self.path, key=keys.split()[0])
        return default

    def number(self, keys: str, cls: type[int] | type[float], default: Any = REQUIRED) -> Any:
        """Returns a number; None if the value is null.

        Raises:
            UserError: If it is anything else.
        """
        value = self.get(keys, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or (is_number and math.isfinite(value) and cls(value) == value):
            return value if value is None else cls(value)
        key = keys.split()[0]
        expected = "an integer" if cls is int else "a number"
        raise self.unusable(key, value, expected)

    def inner(self, values: Mapping[str, Any]) -> ConfigValues:
        """The values of an object in the file."""
        return ConfigValues(self.path, values, self.lacking)

    def unusable(self, key: str, value: Any, wanted: str) -> UserError:
        """The error of a value of another type."""
        return user_error("hf-config-value", path=self.path, key=key, value=value, wanted=wanted)

    def lack(self, part: str, key: str, value: Any) -> None:
        self.lacking.append(f"{part} ({key}: {value!r})")


@dataclass(frozen=True)
class Row:
    """Some keys and the fields that they determine."""

    read: Callable[[ConfigValues], Fields]
    write: Callable[[Any], dict[str, Any]]
    """Returns the keys for the options group that has the fields."""
    is_of_experts: bool = False
    """Whether these are a `MoEConfig`, not a `ModelConfig`."""


def number(keys: str, field: str, cls: type[int] | type[float], default: Any = REQUIRED) -> Row:
    """A number that both sides have.

    Args:
        keys: The key that is written and, after it, other spellings that are read.
        field: The field. Null is the absence of an optional part or size, and no dropout.
        cls: Type of the number.
        default: Value of an absent key.
    """

    def read(config: ConfigValues) -> Fields:
        value = config.number(keys, cls, default)
        if value is None and field.endswith("_dropout"):
            value = 0.0
        if value is None and FIELD_DEFAULTS[field] is not None:
            raise config.unusable(keys.split()[0], value, "a number")
        return {} if value is None else {field: value}

    def write(options: ModelConfig | MoEConfig) -> dict[str, Any]:
        return {keys.split()[0]: values_of(options)[field]}

    return Row(read, write, field in EXPERT_FIELDS)


def values_of(options: ModelConfig | MoEConfig) -> Fields:
    """The values of all fields that a model uses."""
    derived = options.derived_values if isinstance(options, ModelConfig) else {}
    return {**vars(options), **derived}


def choice(key: str, part: str, default: Any, meanings: Mapping[Any, Fields]) -> Row:
    """A value that sets one or several fields.

    Args:
        key: The key.
        part: Feature that the key selects, for the message about other values.
        default: Value of an absent key.
        meanings: Fields by value. Of several values with the same fields the first is written.
    """

    def read(config: ConfigValues) -> Fields:
        value = config.get(key, default)
        same = (meaning for meaning in meanings if (type(meaning), meaning) == (type(value), value))
        fields = next((meanings[meaning] for meaning in same), None)
        if fields is None:
            config.lack(part, key, value)
        return fields or {}

    def write(options: ModelConfig | MoEConfig) -> dict[str, Any]:
        values = values_of(options)
        fitting = (
            value
            for value, fields in meanings.items()
            if all(values.get(name) == wanted for name, wanted in fields.items())
        )
        # Without a fitting value the fields differ when the result is read back.
        return {key: next(fitting, next(iter(meanings)))}

    names = {name for fields in meanings.values() for name in fields}
    return Row(read, write, bool(names & EXPERT_FIELDS))


def layer_types(config: ConfigValues, every: int, pattern_key: str | None = None) -> list[str]:
    """The type of each layer, `layer_types` or, without it, all but every N-th with a window.

    Args:
        config: The values.
        every: N.
        pattern_key: Key that has another N. None: the family has none.

    Raises:
        UserError: If the values are of other types.
    """
    if pattern_key is not None:
        every = config.number(pattern_key, int, every) or 0
        if every < 1:
            raise config.unusable(pattern_key, config.get(pattern_key), "a positive integer")
    types = config.get("layer_types", None)
    if types is None:
        layers = range(1, config.number("num_hidden_layers", int) + 1)
        return [WINDOWED if layer % every else FULL for layer in layers]
    if not isinstance(types, list):
        raise config.unusable("layer_types", types, "a list")
    return [OLDER_TYPES.get(str(name), str(name)) for name in types]


def ignored(*, is_of_experts: bool = False, **values: Any) -> Row:
    """Keys that change nothing; written with these values."""
    return Row(lambda config: {}, lambda model: dict(values), is_of_experts)
