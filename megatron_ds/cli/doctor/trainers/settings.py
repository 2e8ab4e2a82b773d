"""Values of a configuration file while they are translated. Knows no trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

OFF: tuple[object, ...] = (None, False, "", [], {}, "none", "None")
"""Values by which a file switches something off."""


@dataclass
class Settings:
    """The keys of a file, and what they have become.

    Attributes:
        values: Values by key, with the trainer's defaults. Translated keys are removed.
        given: The keys that are in the file itself.
        flags: Arguments of pretrain_gpt.py.
        differences: Settings with another meaning here, with both values.
        lacking: Settings without a counterpart, with advice.
        unread: Keys that change neither the model nor what is learned.
    """

    values: dict[str, Any]
    given: frozenset[str] = frozenset()
    flags: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def take(self, key: str, default: Any = None) -> Any:
        """A value, which is then no longer among `values`; `default` also for null."""
        value = self.values.pop(key, None)
        return default if value is None else value

    def get(self, key: str, default: Any = None) -> Any:
        """A value, which stays among `values`; `default` also for null."""
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: Any = None, *, keeps: bool = False) -> Any:
        """A number, also of a text such as `1e-4`, which YAML does not read as a number.

        Args:
            key: Its key, which is taken out.
            default: Value without the key, and for a text that is not a number, which is reported.
            keeps: Keep the key, whose flag reports a text that is not a number.
        """
        value = self.get(key) if keeps else self.take(key)
        try:
            result = default if value is None else float(value)
            if result is not None and not math.isfinite(result):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            self.lacking += [f"{key} {value}: must be a number"] * (not keeps)
            return default
        return int(result) if isinstance(result, float) and result.is_integer() else result

    def add(self, flag: str, *values: object) -> None:
        """Adds a flag; numbers are written with up to ten digits."""
        self.flags += [f"--{flag}", *map(text_of, values)]


def text_of(value: object) -> str:
    """A value as an argument: `0.0003`, and `1e-05` without the rounding errors of a product."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def is_off(value: object) -> bool:
    """Whether a value switches something off; 0 and 0.0 do as well."""
    return value in OFF


def decay_of_all(settings: Settings, weight_decay: float, *, has_biases: bool = False) -> None:
    """Adds the weight decay of norms and biases, which have none here.

    Args:
        settings: Receives the flag.
        weight_decay: The decay of all other weights.
        has_biases: Whether the model has biases. A pattern that matches no weight is an error.
    """
    if weight_decay:
        patterns = ["*norm*", "*bias*"] if has_biases else ["*norm*"]
        rate = text_of(weight_decay)
        settings.add("param-group", *(f"pattern={pattern},wd={rate}" for pattern in patterns))
