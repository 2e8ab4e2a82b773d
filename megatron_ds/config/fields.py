"""Option fields: dataclass fields that are command-line flags, and the checks they declare.

Owns the declaration of a flag (help, range, requirements) and the checks that follow from it for
any dataclass of options. Knows no particular option and no argparse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_ds.config.problems import Problem, option

UNSET_INT = 0
UNSET_FLOAT = math.nan
"""Defaults of required fields: values that no valid configuration has."""


class _AnyValue:
    """Matches every value except None."""


ANY_VALUE = _AnyValue()


@dataclasses.dataclass(frozen=True)
class Condition:
    """Values of other fields of the same dataclass, of which at least one must match."""

    admitted: Mapping[str, tuple[Any, ...]]

    def holds(self, options: Any) -> bool:
        return any(
            value in values or (ANY_VALUE in values and value is not None)
            for name, values in self.admitted.items()
            for value in (getattr(options, name),)
        )

    def describe(self) -> str:
        """The flags that satisfy the condition: `--fp16 or --bf16`."""
        return " or ".join(_describe_choice(name, values) for name, values in self.admitted.items())

    def describe_unmet(self) -> str:
        """What prevents the condition: `without --fp16`, or `with --loss-scale`."""
        if all(values == (None,) for values in self.admitted.values()):
            return f"with {self.describe()}"
        return f"without {self.describe()}"


def when(**admitted: Any) -> Condition:
    """A condition on other fields: `when(fp16=True, bf16=True)` means either.

    Args:
        admitted: By field, a value or a tuple of values that satisfies the condition. `ANY_VALUE`
            stands for everything except None.
    """
    return Condition(
        {
            name: values if isinstance(values, tuple) else (values,)
            for name, values in admitted.items()
        }
    )


def option_field(
    default: Any,
    help: str,
    *,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    values: Mapping[str, str] | None = None,
    nargs: str | int | None = None,
    metavar: str | None = None,
    required: bool = False,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    requires: Condition | None = None,
    only_with: Condition | tuple[Condition, ...] = (),
    positional: bool = False,
    repeatable: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: Default value. A required field has `UNSET_INT` or `UNSET_FLOAT`, or None.
        help: Help text. The flags' table adds default, range and aliases.
        flag: Name of the flag, without dashes, if it is not the field's name with `-` for `_`. A
            boolean field whose default is True names its negative flag here
            (`disable-bias-linear`); otherwise it is `no-<name>`.
        aliases: Further flags that set the same field.
        choices: Valid values.
        values: Other spellings of a choice, mapped to the choice.
        nargs: Number of values, or "*".
        metavar: Name of the value in the help.
        required: Whether a value must be given.
        minimum: Smallest valid value.
        above: Bound that every valid value exceeds.
        maximum: Largest valid value.
        below: Bound that no valid value reaches.
        requires: Condition without which a value other than the default is an error.
        only_with: Conditions without any of which a given flag has no effect, with a warning.
        positional: Whether the value is given without a flag.
        repeatable: Whether a repeated flag adds values instead of replacing them.
    """
    metadata = {
        "help": help,
        "flag": flag,
        "aliases": aliases,
        "choices": choices,
        "values": dict(values or {}),
        "nargs": nargs,
        "metavar": metavar,
        "required": required,
        "range": _describe_range(minimum, above, maximum, below),
        "bounds": (minimum, above, maximum, below),
        "requires": requires,
        "only_with": only_with if isinstance(only_with, tuple) else (only_with,),
        "positional": positional,
        "repeatable": repeatable,
    }
    return dataclasses.field(default=default, metadata=metadata)


def option_group(
    default: Any,
    *,
    flags: Mapping[str, str | tuple[str, ...] | None] | None = None,
    hidden: bool = False,
) -> Any:
    """A dataclass field that holds a group of options, an instance of another such dataclass.

    Args:
        default: Default values of the group.
        flags: The tool's flags for fields of the group, or of groups in it, that are not the
            declared ones: by field the flag's name, or name and aliases, or None for no flag.
        hidden: Whether the help leaves the group out.
    """
    metadata = {"flags": dict(flags or {}), "hidden": hidden}
    return dataclasses.field(default=default, metadata=metadata)


def option_fields(options: Any) -> list[dataclasses.Field[Any]]:
    """The option fields of a dataclass or an instance; other fields have no flag."""
    return [item for item in dataclasses.fields(options) if "bounds" in item.metadata]


def is_unset(item: dataclasses.Field[Any], value: Any) -> bool:
    """Whether a required field still has its default, which is no valid value."""
    return value is None or value == item.default or value != value


def field_problems(options: Any, given: Collection[str] = ()) -> Iterator[Problem]:
    """Check each option by itself: required, finite, in range, among the choices.

    Args:
        options: An instance of a dataclass with option fields.
        given: Names of the fields that the user set.
    """
    for item in option_fields(options):
        name, value = item.name, getattr(options, item.name)
        if item.metadata["required"] and name not in given and is_unset(item, value):
            yield missing_problem(name)
            continue
        requires = item.metadata["requires"]
        is_default = value is None or value == item.default
        if is_default and name not in given:
            continue
        if requires is not None and not is_default and not requires.holds(options):
            yield Problem(
                "missing-requirement",
                name,
                *requires.admitted,
                flag=option(name),
                describe=requires.describe(),
            )
        for each in value if isinstance(value, tuple) else (value,):
            yield from _value_problems(item, each)


def _value_problems(item: dataclasses.Field[Any], value: Any) -> Iterator[Problem]:
    name, choices = item.name, item.metadata["choices"]
    if choices is not None and value is not None and value not in choices:
        yield choice_problem(name, value, choices)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        yield Problem("not-finite", name, flag=option(name), value=value)
    elif not _is_within(value, *item.metadata["bounds"]):
        yield Problem(
            "out-of-range", name, flag=option(name), value=value, range=item.metadata["range"]
        )


def missing_problem(name: str) -> Problem:
    """The problem of a field without a value."""
    return Problem("required", name, flag=option(name))


def choice_problem(name: str, value: str, choices: Collection[str], hint: str = "") -> Problem:
    """The problem of a value that is not among the choices of a field.

    Args:
        hint: Continues the message, such as "; did you mean rope?".
    """
    return Problem(
        "invalid-choice",
        name,
        flag=option(name),
        value=value,
        choices=", ".join(choices),
        hint=hint,
    )


def ineffective(options: Any, given: Collection[str], context: Any = None) -> Iterator[Problem]:
    """Warn of flags that have no effect next to the values of other options.

    Args:
        options: An instance of a dataclass with option fields.
        given: Names of the fields that the user set.
        context: Object with the attributes that the conditions name. Default: `options`.
    """
    context = options if context is None else context
    unmet: dict[str, list[str]] = {}
    for item in option_fields(options):
        if item.name not in given:
            continue
        for condition in item.metadata["only_with"]:
            if not condition.holds(context):
                unmet.setdefault(condition.describe_unmet(), []).append(item.name)
                break
    for reason, names in unmet.items():
        flags = ", ".join(map(option, names))
        have = "has" if len(names) == 1 else "have"
        yield Problem("no-effect", *names, flags=flags, have=have, reason=reason)


def exclusive_problem(*names: str, reason: str = "") -> Problem:
    """The problem of options that cannot be combined.

    Args:
        reason: Continues the message after a colon.
    """
    because = f": {reason}" if reason else ""
    return Problem("mutually-exclusive", *names, join_flags=join_flags(names), because=because)


def join_flags(names: Sequence[str]) -> str:
    """References to fields as a list: `--a, --b and --c`."""
    *others, last = map(option, names)
    return f"{', '.join(others)} and {last}" if others else last


def with_value(options: Any, name: str) -> str:
    """A field's flag and value as on a command line: `--rampup-batch-size 4 4 100`."""
    value = getattr(options, name)
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([option(name), *map(str, values)])


def _is_within(
    value: float,
    minimum: float | None,
    above: float | None,
    maximum: float | None,
    below: float | None,
) -> bool:
    return (
        (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (maximum is None or value <= maximum)
        and (below is None or value < below)
    )


def _describe_range(
    minimum: float | None, above: float | None, maximum: float | None, below: float | None
) -> str:
    """The valid range for help and messages: `at least 0 and less than 1`; "" without bounds."""
    bounds = (
        ("at least", minimum),
        ("greater than", above),
        ("at most", maximum),
        ("less than", below),
    )
    return " and ".join(f"{words} {bound:.15g}" for words, bound in bounds if bound is not None)


def _describe_choice(name: str, values: tuple[Any, ...]) -> str:
    shown = [str(value) for value in values if isinstance(value, str)]
    return " ".join([option(name), " or ".join(shown)]).rstrip()
