"""Reads the values of --param-group: learning rate and weight decay by the names of weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from megatron_ds.dataclass import dataclass

KEYS = ("pattern", "lr", "wd")
NEAR_NAMES = 5


@dataclass(frozen=True)
class Setting:
    """A value, or a factor of the value that a weight has otherwise."""

    value: float
    is_factor: bool

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read `0.1` or `0.5x`.

        Raises:
            ValueError: If it is not a finite number of at least 0.
        """
        value = float(text.removesuffix("x"))
        if not (math.isfinite(value) and value >= 0):
            raise ValueError
        return cls(value, text.endswith("x"))

    def factor(self, otherwise: float, base: float) -> float:
        """The factor of a schedule.

        Args:
            otherwise: The factor of a weight that no pattern matches.
            base: Value of the option that the schedule is of.
        """
        if self.is_factor:
            return otherwise * self.value
        return self.value / base if self.value else 0.0


@dataclass(frozen=True)
class ParamGroup:
    """A pattern of names, and what is set for the weights that have them."""

    pattern: str
    lr: Setting | None = None
    wd: Setting | None = None

    @classmethod
    def parse(cls, text: str) -> ParamGroup:
        """Read `pattern=GLOB,lr=...,wd=...`.

        Raises:
            ValueError: With the reason, if it has another form.
        """
        pairs = [entry.partition("=") for entry in text.split(",")]
        values = {key.strip(): value.strip() for key, _, value in pairs}
        if unknown := [key for key in values if key not in KEYS]:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(KEYS)}")
        if len(values) < len(pairs):
            raise ValueError("a key is repeated")
        if not values.get("pattern"):
            raise ValueError("it has no pattern=")
        pattern = values.pop("pattern")
        settings = {}
        if not values:
            raise ValueError("it has neither lr= nor wd=")
        for key, value in values.items():
            try:
                settings[key] = Setting.parse(value)
            except ValueError:
                form = "a number from 0, or a factor such as 0.1x"
                raise ValueError(f"{key}={value} must be {form}") from None
        return cls(pattern, **settings)

    def matches(self, name: str) -> bool:
        """Whether a weight of this canonical name is in the group."""
        return fnmatchcase(name, self.pattern)


def group_problems(
    texts: Iterable[str], *, lr: float, weight_decay: float
) -> Iterator[tuple[str, str]]:
    """The values of the flag that cannot be read or applied, and the reasons.

    Args:
        texts: The values.
        lr: --lr.
        weight_decay: --weight-decay.
    """
    for text in texts:
        try:
            group = ParamGroup.parse(text)
        except ValueError as error:
            yield text, str(error)
            continue
        for key, setting, base in (("lr", group.lr, lr), ("wd", group.wd, weight_decay)):
            if setting is not None and setting.value and not (setting.is_factor or base):
                yield text, f"{key}= follows a schedule that is 0: set a positive maximum of it"


def unused_groups(texts: Iterable[str], names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The values of the flag that apply to no weight, and the reasons.

    Args:
        texts: Readable values.
        names: Canonical names of all weights.
    """
    names = list(names)
    groups = [ParamGroup.parse(text) for text in texts]
    for text, group in zip(texts, groups, strict=True):
        hits = [name for name in names if group.matches(name)]
        earlier = groups[: groups.index(group)]
        if not hits:
            near = get_close_matches(group.pattern, names, NEAR_NAMES, cutoff=0.0)
            yield text, f"no weight has such a name; near ones are {', '.join(near)}"
        elif all(any(other.matches(name) for other in earlier) for name in hits):
            yield text, "earlier patterns match all of its weights; give the narrower one first"
