"""Reads the arguments of a command line with a table of flags.

Owns how arguments become values and the problems of arguments; the flags themselves are in
`flags.py`. argparse stops at the first invalid value, so lines are scanned here: all problems of a
line are reported at once. Knows no torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from typing import Any

from megatron_ds.cli.flags import Flag, FlagTable, dashed, refused_values
from megatron_ds.config.fields import ABOVE_ONE, choice_problem
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.dataclass import dataclass

NEGATIONS = ("no-", "disable-")
OFF = (["0"], ["false"], ["no"], ["off"])
"""Values of a switch that is off."""
DASHES = ("\u2012", "\u2013", "\u2014", "\u2212")
"""Characters into which editors and web pages turn hyphens."""
EXPONENTS = {"K": 3, "M": 6, "B": 9, "T": 12}
"""Suffixes of numbers of tokens and samples, such as 300B."""
LARGEST_EXACT = 2**53
"""Larger numbers with a point or an exponent may not be the integer that was written."""


@dataclass
class ParsedLine:
    """The content of a command line.

    Attributes:
        values: Values by option field.
        unreadable: Fields whose value could not be read or whose flag was misspelt, so that nothing
            is known about them.
        unknown: The arguments of unknown flags, if they were not reported as problems.
        implied: Defaults that follow from the spelling of the flags, by option field.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)
    unknown: list[str] = field(default_factory=list)
    implied: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GivenFlag:
    """A flag that sets a field, as it was written."""

    flag: Flag
    option: str
    arguments: tuple[str, ...]
    value: Any

    def __str__(self) -> str:
        return " ".join((self.option, *self.arguments))


def scan(argv: Sequence[str], table: FlagTable, *, keep_unknown: bool = False) -> ParsedLine:
    """Read a command line.

    Args:
        argv: The arguments without the program's name.
        table: The flags of the program.
        keep_unknown: Collect the arguments of unknown flags instead of reporting them.
    """
    scanner = Scanner(table, keep_unknown=keep_unknown)
    for flag, arguments, written in _options(argv):
        scanner.read(flag, arguments, written)
    scanner.finish()
    scanner.apply_dialects()
    return scanner.line


class Scanner:
    """Reads flags one after the other.

    Args:
        table: The flags of the program.
        keep_unknown: Collect the arguments of unknown flags instead of reporting them.

    Attributes:
        line: Content read so far; complete after `finish`.
    """

    def __init__(self, table: FlagTable, *, keep_unknown: bool = False) -> None:
        self.line = ParsedLine()
        self._table = table
        self._keep_unknown = keep_unknown
        self._given: dict[str, GivenFlag] = {}
        self._extra: list[tuple[str, Flag | None, str]] = []
        self._ignored: dict[str, list[str]] = {}
        self._misspelt: list[str] = []
        self._readable: list[GivenFlag] = []

    def read(self, option: str, arguments: list[str], written: str = "") -> None:
        """Reads a flag as it is written, or the arguments before the first one, with "" for it.

        Args:
            option: The flag.
            arguments: Its values.
            written: Its word, which may have the first value, `--name=value`.
        """
        flag = self._table.find(option) if option.startswith("--") else None
        if flag is not None:
            self._read_flag(flag, option, arguments)
        elif not option:
            self._extra += [(argument, None, "") for argument in arguments]
        elif self._keep_unknown:
            is_joined = written.startswith(f"{option}=")
            self.line.unknown += [written, *arguments[1:]] if is_joined else [option, *arguments]
        else:
            self._report_unknown(option, arguments)

    def finish(self) -> ParsedLine:
        """Compares the flags with each other."""
        line = self.line
        self._read_positionals()
        for reason, options in self._ignored.items():
            has = "has" if len(options) == 1 else "have"
            shown = ", ".join(dict.fromkeys(options))
            line.warnings.append(Problem("ignored-flag", shown=shown, has=has, reason=reason))
        line.values, contradictions = _resolve(list(self._given.values()))
        line.unreadable |= {name for name in self._misspelt if name not in line.values}
        line.problems += [
            Problem("flag-requires-another", entry.flag.needs, given=entry.option)
            for entry in self._readable
            if entry.flag.needs and entry.flag.needs not in line.values.keys() | line.unreadable
        ]
        line.problems += contradictions
        return line

    def apply_dialects(self) -> None:
        """Applies the defaults of a framework that alone has one of the spellings."""
        line = self.line
        ours = self._table.by_field
        for dialect in self._table.dialects:
            written = [
                entry.option for entry in self._readable if dashed(entry.option) in dialect.flags
            ]
            if not written or line.values.get(dialect.when) != ABOVE_ONE:
                continue
            line.implied = {k: v for k, v in dialect.defaults.items() if k not in line.values}
            values = [
                f"{ours[k].label} {v} (else {ours[k].default})" for k, v in line.implied.items()
            ]
            shown = ", ".join(dict.fromkeys(written))
            listed = ", ".join(values)
            problem = Problem("implied-defaults", shown=shown, owner=dialect.owner, values=listed)
            line.warnings += [problem] if values else []

    def _report_unknown(self, option: str, arguments: Sequence[str]) -> None:
        table = self._table
        name = dashed(option).lstrip("-").rpartition(".")[2]  # torchtitan's have sections
        meant = table.same.get(name) or _closest(name, table)
        hint = f"; did you mean --{meant}?" if meant else " (--help-all lists the flags)"
        if name in table.advice:
            meant = ""
            hint = f": {table.advice[name]}"
        if [argument.lower() for argument in arguments] in OFF:
            meant = ""
            hint = "; its value switches it off: leave it out"
        self.line.problems.append(Problem("unknown-flag", flag=option, hint=hint))
        if meant:
            self._misspelt.append(table.by_name[dashed(meant)].field)

    def _read_flag(self, flag: Flag, option: str, arguments: list[str]) -> None:
        count = len(arguments) if flag.nargs == "*" else flag.count
        self._extra += [(argument, flag, option) for argument in arguments[count:]]
        try:
            value = _value(flag, option, arguments[:count])
        except UserError as error:
            self.line.problems += error.problems
            self.line.unreadable.update(*(problem.fields for problem in error.problems))
            return
        entry = GivenFlag(flag, option, tuple(arguments[:count]), value)
        self._readable.append(entry)
        if flag.outcome == "ignored" and not _is_accepted(flag, arguments):
            self._ignored.setdefault(flag.help, []).append(option)
        elif flag.outcome == "set":
            self._set(entry)

    def _set(self, new: GivenFlag) -> None:
        if new.flag.repeatable:
            # All names of a repeatable flag add to one list.
            old = self._given.get(new.flag.names[0])
            values = (*old.value, *new.value) if old else new.value
            self._given[new.flag.names[0]] = GivenFlag(new.flag, new.option, new.arguments, values)
            return
        old = self._given.pop(dashed(new.option), new)
        if old is not new and old.value != new.value:  # nan differs from itself
            self.line.warnings.append(Problem("repeated-flag", new.flag.field, old=old, new=new))
        self._given[dashed(new.option)] = new

    def _read_positionals(self) -> None:
        """Arguments that belong to no flag are the values without a flag, in order."""
        positionals = self._table.positionals
        extra = self._extra
        load = [flag for flag in self._table.own if flag.field == "load" and flag.required]
        if load and "load" not in self._given and extra:
            argument, owner, _ = extra[0]
            if owner is None and not (argument.isspace() or argument.startswith(DASHES)):
                positionals = load  # a folder needs no flag
        if positionals and positionals[-1].nargs == "*":
            names = [argument for argument, _, _ in extra[len(positionals) - 1 :]]
            extra = extra[: len(positionals) - 1]
            if names:
                self._read_flag(positionals[-1], positionals[-1].metavar, names)
        for flag, (argument, _, _) in zip(positionals, extra, strict=False):
            self._read_flag(flag, flag.metavar, [argument])
        numbers = {0: "no value", 1: "one value"}
        for argument, owner, option in extra[len(positionals) :]:
            expected = ""
            if owner is not None:
                expected = f": {option} takes {numbers.get(owner.count, f'{owner.nargs} values')}"
                is_off = owner.nargs == 0 and [argument.lower()] in OFF
                expected += "; leave it out to switch it off" if is_off else ""
            if argument.startswith(DASHES):
                expected = ": a flag begins with two hyphens (--), and this is another dash"
            elif argument.isspace():
                expected = ": a backslash that continues a line must be its last character"
            self.line.problems.append(
                Problem("unexpected-argument", argument=argument, expected=expected)
            )


def _closest(name: str, table: FlagTable) -> str:
    """The option with the most similar name, never one that negates it; "" without a similar
    one."""
    options = (word for word, flag in table.by_name.items() if flag.outcome == "set")
    names = [word for word in options if word.startswith(NEGATIONS) == name.startswith(NEGATIONS)]
    return "".join(difflib.get_close_matches(name, names, n=1, cutoff=0.75))


def _options(argv: Sequence[str]) -> Iterator[tuple[str, list[str], str]]:
    """Split a line into flags, each with the arguments up to the next one; `--a=b` is `--a b`.

    Arguments before the first flag come with the flag "". The third item is the flag's word.
    """
    option = ""
    written = ""
    arguments = list[str]()
    for word in argv:
        # A dash before a digit is a sign, and text such as "- a b" is a value.
        if not re.match(r"-(?!\.?\d)[^\s=]+(=|$)", word, flags=re.DOTALL):
            arguments.append(word)
            continue
        if option or arguments:
            yield option, arguments, written
        option, equals, value = word.partition("=")
        written = word
        arguments = [value] if equals else []
    if option or arguments:
        yield option, arguments, written


def _value(flag: Flag, option: str, arguments: Sequence[str]) -> Any:
    """The value that a flag sets; None if it sets nothing.

    Raises:
        UserError: If the flag is refused or its values cannot be read.
    """
    if flag.outcome == "refused":
        if _is_accepted(flag, arguments):
            return None
        shown = " ".join([option, *arguments])
        raise user_error("unsupported-flag", shown=shown, help=flag.help)
    if flag.nargs == 0:
        return flag.const
    is_ignored = flag.outcome == "ignored"
    if len(arguments) < flag.count and not (is_ignored and flag.nargs == "*"):
        fields = (flag.field,) if flag.field else ()
        count = flag.count
        needed = "a value" if count == 1 else f"{count} values, not {len(arguments)}"
        raise user_error(
            "flag-needs-a-value", *fields, flag=option, needed=needed, usage=flag.usage
        )
    if is_ignored:
        return None
    values = tuple(_converted(flag, option, argument) for argument in arguments)
    is_off = flag.zero_is_off and values == (0,)
    return values if flag.nargs != 1 else None if is_off else values[0]


def _is_accepted(flag: Flag, arguments: Sequence[str]) -> bool:
    return bool(arguments) and all(
        any(_is_same(argument, value) for value in flag.accepted_values) for argument in arguments
    )


def _is_same(argument: str, other: str) -> bool:
    try:
        return float(argument) == float(other)
    except ValueError:
        return argument == other


def _converted(flag: Flag, option: str, argument: str) -> Any:
    if not argument.strip():
        raise user_error("empty-value", flag.field, flag=option)
    exponent = EXPONENTS.get(argument[-1].upper())
    if exponent and flag.kind in (int, float) and flag.field.endswith(("tokens", "samples")):
        with suppress(UserError):
            return _converted(flag, option, f"{argument[:-1]}e{exponent}")
    if flag.kind in (int, float):
        _check_suffix(flag, option, argument)
    if flag.kind is int:
        return _integer(flag, option, argument)
    if flag.kind is range:
        return _range(flag, option, argument)
    if flag.kind is float:
        with suppress(ValueError):
            return float(argument)
        raise user_error("not-a-number", flag.field, flag=option, argument=argument)
    chosen = flag.synonyms.get(argument, argument)
    if flag.choices and chosen not in flag.choices:
        raise UserError(_invalid_choice(flag, option, argument))
    return chosen


def _check_suffix(flag: Flag, option: str, argument: str) -> None:
    """Reports letters after a number, such as Q in 1Q or k in 8k.

    Raises:
        UserError: If there are letters.
    """
    match = re.fullmatch(r"([-+]?[\d_.,]+(?:e[-+]?\d+)?)\s*([^\W\d_]+)", argument, re.IGNORECASE)
    if match is None:
        return
    suffix = match[2]
    values = {"flag": option, "argument": argument, "suffix": suffix}
    if flag.field.endswith(("tokens", "samples")):
        raise user_error("number-suffix-unknown", flag.field, **values)
    raise user_error("number-with-suffix", flag.field, **values)


def _integer(flag: Flag, option: str, argument: str) -> int:
    """An integer, which may be written 1e6 or 1000.0."""
    with suppress(ValueError):
        return int(argument)
    with suppress(ValueError):
        value = float(argument)
        if value.is_integer() and abs(value) <= LARGEST_EXACT:
            return int(value)
    raise user_error("not-an-integer", flag.field, flag=option, argument=argument)


def _range(flag: Flag, option: str, argument: str) -> range:
    """A number from 0, or an inclusive range such as 3-7."""
    first, dash, last = argument.partition("-")
    if first.isdecimal() and (last.isdecimal() or not dash):
        numbers = range(int(first), int(last or first) + 1)
        if numbers:
            return numbers
    raise user_error("not-a-range", flag.field, flag=option, argument=argument)


def _invalid_choice(flag: Flag, option: str, argument: str) -> Problem:
    reason = refused_values().get(flag.field, {}).get(argument)
    if reason is not None:
        return Problem("unsupported-value", flag.field, flag=option, value=argument, reason=reason)
    lowered = {choice.lower(): choice for choice in (*flag.synonyms, *flag.choices)}
    near = difflib.get_close_matches(argument.lower(), lowered, n=1, cutoff=0.6)
    hint = f"; did you mean {lowered[near[0]]}?" if near else ""
    return choice_problem(flag.field, argument, flag.choices, hint)


def _resolve(entries: list[GivenFlag]) -> tuple[dict[str, Any], list[Problem]]:
    """The values by field, and the flags that give one field different values."""
    problems = []
    first: dict[str, GivenFlag] = {}
    for entry in sorted(entries, key=lambda item: bool(item.flag.yields_to)):
        before = first.setdefault(entry.flag.field, entry)
        if before.value in entry.flag.yields_to:
            continue
        if before is not entry and before.value != entry.value:
            problems.append(
                Problem("contradicting-flags", entry.flag.field, before=before, each=entry)
            )
    values = {name: item.value for name, item in first.items()}
    written = {dashed(item.option) for item in entries}
    if "glu-activation" in written and "hidden_size" in values:
        # The fork that has the flag does not shrink the MLP of gated activations.
        values.setdefault("ffn_hidden_size", 4 * values["hidden_size"])
    if "no-bias-gelu-fusion" in written and values.get("activation", "gelu") != "gelu":
        # The switch turns off a kernel that the other activations do not have.
        del values["gelu_approximation"]
    return values, problems
