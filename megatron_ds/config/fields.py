"""Option fields: dataclass fields that are command-line flags, and the checks they declare.

Owns the declaration of a flag (range, requirements, what it decides) and the checks that follow
from it for any dataclass of options. Knows no particular option and no argparse.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from megatron_ds.config.problems import Problem, option
from megatron_ds.dataclass import dataclass

P = ParamSpec("P")
Options = TypeVar("Options", bound=Any)

UNSET_INT = 0
UNSET_FLOAT = math.nan
"""Defaults of required fields: values that no valid configuration has."""


class _AnyValue:
    """Equals every value except None."""

    def __eq__(self, other: object) -> bool:
        return other is not None


class _NonZero:
    """Equals every value except None and 0."""

    def __eq__(self, other: object) -> bool:
        return bool(other)


class _AboveOne:
    """Equals every number greater than 1, and a list of numbers with one."""

    def __eq__(self, other: object) -> bool:
        values = other if isinstance(other, tuple | list) else (other,)
        return any(isinstance(value, int | float) and value > 1 for value in values)


ANY_VALUE = _AnyValue()
NON_ZERO = _NonZero()
ABOVE_ONE = _AboveOne()


@dataclass(frozen=True)
class Condition:
    """Values of other fields of the same dataclass; at least one must match."""

    admitted: Mapping[str, tuple[Any, ...]]
    without_flags: bool = False
    """Whether the condition holds while the flags of these fields are not given."""

    def holds(self, options: Any) -> bool:
        return any(getattr(options, name) in values for name, values in self.admitted.items())

    def describe(self) -> str:
        """The flags that satisfy the condition: `--fp16 or --bf16`, `--zero-stage 3`."""
        shown = {
            name: " or ".join(str(value) for value in values if type(value) in (str, int))
            for name, values in self.admitted.items()
        }
        return " or ".join(f"{option(name)} {values}".rstrip() for name, values in shown.items())

    def describe_unmet(self) -> str:
        """Returns what prevents the condition: `without --fp16`, or `with --loss-scale`."""
        return f"{'with' if self.without_flags else 'without'} {self.describe()}"


def when(**admitted: Any) -> Condition:
    """A condition on other fields: `when(fp16=True, bf16=True)` means either.

    Args:
        admitted: Value, or tuple of values, that satisfies the condition, by field. `ANY_VALUE`
            means everything except None, `NON_ZERO` for everything except None and 0, `ABOVE_ONE`
            for numbers greater than 1.
    """
    return Condition(
        {name: value if isinstance(value, tuple) else (value,) for name, value in admitted.items()}
    )


class Decides(enum.Flag):
    """Aspect of a run that the value of an option determines, and with it where the value may
    change.

    The option of a group that names nothing else decides the group's `DECIDES`.
    docs/reference/changes.md lists the options.
    """

    WEIGHTS = enum.auto()
    """Names and shapes of the weights, or what they mean: fixed on a resume."""
    ROTATION = enum.auto()
    """Rotary positions: fixed on a resume without --override-rope."""
    INITIAL_VALUES = enum.auto()
    """Values with which a run begins: without an effect on a resume."""
    TOKENS = enum.auto()
    """Token ids of a text: fixed on a resume, by the fingerprint of the tokenizer."""
    FUNCTION = enum.auto()
    """Function that the model computes, also in evaluation: may change on a resume, with a
    warning."""
    TRAINING = enum.auto()
    """Other computations of a training step: may change on a resume, with a warning."""
    SCHEDULE = enum.auto()
    """Learning rate and weight decay over the run: as TRAINING, and subject to
    --override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler."""
    SAMPLES = enum.auto()
    """Samples of a step and their order: fixed on a resume, by the history of the data."""
    CONTENT = enum.auto()
    """Transformations of a sample's tokens: may change on a resume, with a warning."""
    LAYOUT = enum.auto()
    """Layout, memory and speed, and by the rule of this project nothing else: free on a resume."""
    OPERATION = enum.auto()
    """Logs, saves, evaluations and the end of the run: free on a resume; a replay drops it."""
    RUN = enum.auto()
    """Files and start of one run: a fork and a replay drop it."""


NOTHING = Decides(0)


class InPhase(enum.Enum):
    """Role of an option in a phase of a run, an entry of --stages."""

    FIXED = "fixed"
    """The same in all phases."""
    REPLACED = "replaced"
    """A phase may replace the value of the run."""
    COUNTED = "counted"
    """Counts from the start of a phase, and is set in phases only."""


@dataclass(frozen=True)
class OptionSpec:
    """Declaration of a dataclass field that is also a command-line flag.

    Attributes:
        help: Help text, if it is computed. As a rule it is the docstring below the field, see
            `field_help`. --help adds default, range and aliases.
        flag: Name of the flag, without dashes, if it is not the field's name with `-` for `_`. A
            boolean field whose default is True names its negative flag here
            (`disable-bias-linear`); otherwise it is `no-<name>`.
        aliases: Further flags that set the same field.
        choices: Valid values.
        synonyms: Other spellings of a choice, mapped to the choice.
        nargs: Number of values, or "*".
        metavar: Name of the value in the help.
        required: Whether a value must be given. The default is then `UNSET_INT`, `UNSET_FLOAT` or
            None.
        minimum: Smallest valid value.
        above: Bound that every valid value exceeds.
        maximum: Largest valid value.
        below: Bound that no valid value reaches.
        only_with: Conditions; unless one holds, the value has no effect. A given flag then causes a
            warning and never an error, so that the flag it depends on can be removed alone.
        positional: Whether the value is given without a flag.
        repeatable: Whether a repeated flag adds values instead of replacing them.
        zero_is_off: Whether 0 means None, as where Megatron tests the truth of a value.
        common: Whether --help shows the option, and not only --help-all.
        decides: Aspect of a run that the value determines, in the configuration of a run. Default:
            `DECIDES` of the group.
        in_phase: Role of the option in a phase of a run.
    """

    _: dataclasses.KW_ONLY
    help: str = ""
    flag: str | None = None
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nargs: str | int = 1
    metavar: str = ""
    required: bool = False
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    only_with: Condition | tuple[Condition, ...] = ()
    positional: bool = False
    repeatable: bool = False
    zero_is_off: bool = False
    common: bool = False
    decides: Decides = NOTHING
    in_phase: InPhase = InPhase.FIXED

    @property
    def _bounds(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        bounds = (
            ("at least", operator.ge, self.minimum),
            ("greater than", operator.gt, self.above),
            ("at most", operator.le, self.maximum),
            ("less than", operator.lt, self.below),
        )
        return [(words, holds, bound) for words, holds, bound in bounds if bound is not None]

    @property
    def range(self) -> str:
        """The valid range, such as `at least 0 and less than 1`; "" without bounds."""
        words = " and ".join(f"{words} {bound:.15g}" for words, _, bound in self._bounds)
        return f"{words}; 0: off" if self.zero_is_off else words

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """All conditions of `only_with`."""
        return self.only_with if isinstance(self.only_with, tuple) else (self.only_with,)

    def unmet(self, options: Any) -> Condition | None:
        """The first condition of `only_with` that does not hold; None if the value has an effect.

        Args:
            options: Object with the attributes that the conditions name.
        """
        return next((need for need in self.conditions if not need.holds(options)), None)

    def flag_name(self, field: str, default: object) -> str:
        """The main flag of a field, without leading dashes."""
        name = field.replace("_", "-")
        return self.flag or (f"no-{name}" if default is True else name)

    def admits(self, value: float) -> bool:
        """Whether a number is in the range."""
        return all(holds(value, bound) for _, holds, bound in self._bounds)


def _declares(spec: Callable[P, OptionSpec]) -> Callable[Concatenate[Any, P], Any]:
    """A function that declares a dataclass field, with the arguments of `OptionSpec`."""

    def declare(default: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return dataclasses.field(default=default, metadata={"option": spec(*args, **kwargs)})

    return declare


option_field = _declares(OptionSpec)
"""Declares an option: its default, then the arguments of `OptionSpec`; the help is below it."""


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
    return dataclasses.field(default=default, metadata={"flags": flags or {}, "hidden": hidden})


def option_fields(options: Any) -> Iterator[tuple[dataclasses.Field[Any], OptionSpec]]:
    """The option fields of a dataclass or an instance; other fields have no flag."""
    yield from _option_fields(options if isinstance(options, type) else type(options))


@functools.cache
def _option_fields(group: type) -> tuple[tuple[dataclasses.Field[Any], OptionSpec], ...]:
    fields = [item for item in dataclasses.fields(group) if "option" in item.metadata]
    decides = getattr(group, "DECIDES", NOTHING)
    specs = (item.metadata["option"] for item in fields)
    return tuple(
        (item, spec if spec.decides else dataclasses.replace(spec, decides=decides))
        for item, spec in zip(fields, specs, strict=True)
    )


def field_problems(options: Any, set_names: Collection[str] = ()) -> Iterator[Problem]:
    """Check each option by itself: required, finite, in range, among the choices.

    Args:
        options: An instance of a dataclass with option fields.
        set_names: Names of the fields that the user set.
    """
    for item, spec in option_fields(options):
        name = item.name
        value = getattr(options, item.name)
        is_default = value is None or value == item.default
        is_nan = value != value
        if spec.required and name not in set_names and (is_default or is_nan):
            yield Problem("required", name)
            continue
        if is_default and name not in set_names:
            continue
        for entry in value if isinstance(value, tuple) else (value,):
            yield from _value_problems(name, spec, entry)


def _value_problems(name: str, spec: OptionSpec, value: Any) -> Iterator[Problem]:
    if spec.choices and value is not None and value not in spec.choices:
        yield choice_problem(name, value, spec.choices)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not math.isfinite(value):
        yield Problem("not-finite", name, value=value)
    elif not spec.admits(value):
        yield Problem("out-of-range", name, value=value, range=spec.range)


def choice_problem(name: str, value: str, choices: Collection[str], hint: str = "") -> Problem:
    """The problem of a value that is not among the choices of a field.

    Args:
        hint: Continues the message, such as "; did you mean rope?".
    """
    return Problem("invalid-choice", name, value=value, choices=", ".join(choices), hint=hint)


def ineffective(options: Any, set_names: Collection[str], context: Any = None) -> Iterator[Problem]:
    """Warn of flags that have no effect next to the values of other options.

    Args:
        options: An instance of a dataclass with option fields.
        set_names: Names of the fields that the user set.
        context: Object with the attributes that the conditions name. Default: `options`.
    """
    context = options if context is None else context
    by_reason: dict[str, list[str]] = {}
    for item, spec in option_fields(options):
        if item.name in set_names and (unmet := spec.unmet(context)) is not None:
            by_reason.setdefault(unmet.describe_unmet(), []).append(item.name)
    for reason, names in by_reason.items():
        yield no_effect_problem(*names, reason=reason)


def no_effect_problem(*names: str, reason: str) -> Problem:
    """The warning of options without an effect.

    Args:
        reason: Continues "has no effect", such as "without --save".
    """
    flags = ", ".join(map(option, names))
    have = "has" if len(names) == 1 else "have"
    return Problem("no-effect", *names, flags=flags, have=have, reason=reason)


def with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options from JSON, which has lists where options have tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def in_effect(options: Options) -> Options:
    """The options, with the defaults of the fields that have no effect."""
    group: Any = type(options)
    defaults = {
        name: default
        for name, default, conditions in _conditional_fields(group)
        if getattr(options, name) is not default
        and not all(condition.holds(options) for condition in conditions)
    }
    return dataclasses.replace(options, **defaults) if defaults else options


@functools.cache
def _conditional_fields(group: Any) -> tuple[tuple[str, Any, tuple[Condition, ...]], ...]:
    """Name, default and conditions of each option field that may have no effect."""
    fields = [(item, spec) for item, spec in _option_fields(group) if spec.only_with]
    return tuple((item.name, item.default, spec.conditions) for item, spec in fields)


def exclusive_problem(*names: str, reason: str = "") -> Problem:
    """The problem of options that cannot be combined.

    Args:
        reason: Continues the message after a colon.
    """
    others = ", ".join(map(option, names[:-1]))
    because = f": {reason}" if reason else ""
    return Problem(
        "mutually-exclusive", *names, others=others, last=option(names[-1]), because=because
    )
