"""The command line: words in, configuration or every error out.

Owns how words become values and the words of the errors; which flags there are stands in
`flags.py`. A line is scanned here and not by argparse, which stops at the first wrong value: all
errors of a line are named at once. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import sys
import time
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds import schedules
from megatron_ds.cli.flags import Flag, all_flags, dashed, help_text, version_text
from megatron_ds.cli.megatron_flags import REFUSED_VALUES, Takes
from megatron_ds.config import GROUPS, Config, flag_of
from megatron_ds.launch.liveness import find_launchers

PROGRAM = "pretrain_gpt.py"
HELP = ("--help", "-h")
VERSION = "--version"
FIRST_RANK_TIMEOUT_S = 10.0
"""Seconds in which a launcher has ended this rank, if the first one has named its problems."""
LARGEST_EXACT = 2**53
"""Beyond it, a number with a point or an exponent need not be the whole number it looks like."""


@dataclass(frozen=True)
class ParsedLine:
    """What a command line says. values: by field. wrong: flags, with dashes, whose value could not
    be read or whose name was mistyped, so that nothing is known of them."""

    values: dict[str, Any]
    problems: list[str]
    warnings: list[str]
    wrong: frozenset[str]


@dataclass(frozen=True)
class GivenFlag:
    """A flag that sets a field, as it stands on the line."""

    flag: Flag
    option: str
    words: tuple[str, ...]
    value: Any


Warn = Callable[[str], None]
Complete = Callable[[Config, int, Warn], tuple[Config, list[str]]]
"""Fills a configuration in from elsewhere, given the number of processes; names problems and warns.
"""
Check = Callable[[Config, int, Warn], list[str]]
"""Problems of a configuration beyond those that its fields show, given the number of processes."""


def build_config(
    argv: Sequence[str],
    *,
    world_size: int,
    warn: Warn,
    complete: Complete | None = None,
    check: Check | None = None,
) -> tuple[Config, list[str]]:
    """The configuration of a command line, and every problem found (empty if the run can start).

    argv: the flags without the program's name. warn is called with one line per warning.
    complete: fills in what other sources than the flags say (the DeepSpeed file). check: looks at
    the machine and the files.
    """
    said = scan(argv)
    for line in said.warnings:
        warn(line)
    config = _config(said.values)
    found: list[str] = []
    if complete is not None:
        config, found = complete(config, world_size, warn)
    found += config.problems(world_size)
    found += schedules.problems(config, config.parallel.data_parallel_size(world_size))
    if check is not None:
        found += check(config, world_size, warn)
    # What follows from a value that could not be read is not known; naming it would mislead.
    told = [config.with_origin(line) for line in found if not _flags_in(line) & said.wrong]
    return config, [*said.problems, *told]


def parse(
    argv: Sequence[str],
    *,
    world_size: int = 1,
    rank: int = 0,
    complete: Complete | None = None,
    check: Check | None = None,
    program: str = PROGRAM,
) -> Config:
    """The configuration of a command line. Ends the program: with status 2 after naming, on the
    first rank and as `program`, every problem; with status 0 after --help or --version."""
    asked = next((word for word in argv if word in (*HELP, VERSION)), None)
    if asked is not None:
        if rank == 0:
            print(version_text() if asked == VERSION else help_text())
        raise SystemExit(0)

    def warn(line: str) -> None:
        if rank == 0:
            print(f"WARNING: {line}", file=sys.stderr, flush=True)

    config, problems = build_config(
        argv, world_size=world_size, warn=warn, complete=complete, check=check
    )
    if problems:
        fail(problems, rank=rank, program=program)
    return config


def fail(problems: Sequence[str], *, rank: int = 0, program: str = PROGRAM) -> typing.NoReturn:
    """Names the problems on the first rank and ends the program with status 2."""
    if rank == 0 or _first_rank_is_silent():
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        lines = "\n".join(f"  - {problem}" for problem in problems)
        print(f"{program}: {count} with the settings:\n{lines}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _first_rank_is_silent() -> bool:
    """Whether the first rank has not named the problems that another one has found.

    A launcher ends all ranks when one of them has ended: the one that speaks is to end first.
    """
    if not find_launchers():
        return False
    try:
        time.sleep(FIRST_RANK_TIMEOUT_S)
    except SystemExit:  # the launcher's signal
        return False
    return True


def scan(
    argv: Sequence[str], *, among: Mapping[str, Flag] | None = None, also: Iterable[str] = ()
) -> ParsedLine:
    """What the words of a command line say, with every error in them.

    among: the flags by their names; those of pretrain_gpt.py if none are given. also: names of
    further flags that the program knows, for the hint at a typing error.
    """
    flags = all_flags() if among is None else among
    names = [*flags, *map(dashed, also)]
    given: dict[str, GivenFlag] = {}
    problems: list[str] = []
    warnings: list[str] = []
    wrong: set[str] = set()
    meant: list[Flag] = []
    dropped: dict[str, list[str]] = {}
    for option, words in _options(argv):
        flag = flags.get(dashed(option)) if option.startswith("--") else None
        if flag is None:
            near = _nearest(option, names)
            problems.append(_unknown(option, words, near))
            meant += [flags[near]] if near is not None and near in flags else []
            continue
        count = len(words) if flag.takes == "*" else int(flag.takes)
        problems += [_extra_value(word, option, flag.takes) for word in words[count:]]
        try:
            value = _value(flag, option, words[:count])
        except ValueError as error:
            problems.append(str(error))
            wrong |= _names_of(flag)
            continue
        if flag.outcome == "dropped":
            dropped.setdefault(flag.explanation, []).append(option)
        elif flag.outcome == "set":
            now = GivenFlag(flag, option, tuple(words[:count]), value)
            before = given.pop(dashed(option), now)
            if before.value != value:
                warnings.append(f"{_shown(before)} is followed by {_shown(now)}, which is taken")
            given[dashed(option)] = now
    for reason, options in dropped.items():
        has = "has" if len(options) == 1 else "have"
        warnings.append(f"{', '.join(dict.fromkeys(options))} {has} no effect: {reason}")
    values, contradictions = _resolve(list(given.values()))
    wrong = wrong.union(*(_names_of(flag) for flag in meant if flag.field not in values))
    return ParsedLine(values, [*problems, *contradictions], warnings, frozenset(wrong))


def _names_of(flag: Flag) -> set[str]:
    """The names by which messages may call a flag."""
    return {dashed(name) for name in flag.names} | (
        {dashed(flag_of(flag.field))} if flag.field else set()
    )


def _options(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag of a line with the words up to the next one; `--a=b` is `--a b`.

    Words before the first flag come with the flag "".
    """
    option, words = "", list[str]()
    for word in argv:
        # A dash before a digit is a sign.
        if not re.match(r"-(?!\.?\d).", word, flags=re.DOTALL):
            words.append(word)
            continue
        if option or words:
            yield option, words
        option, equals, value = word.partition("=")
        words = [value] if equals else []
    if option or words:
        yield option, words


def _nearest(option: str, names: Sequence[str]) -> str | None:
    near = difflib.get_close_matches(dashed(option).lstrip("-"), names, n=1, cutoff=0.6)
    return near[0] if near else None


def _unknown(option: str, words: Sequence[str], near: str | None) -> str:
    if not option:
        return f"{words[0]!r} belongs to no flag"
    hint = f"; did you mean --{near}?" if near else f" ({HELP[0]} lists the flags)"
    return f"there is no flag {option}{hint}"


def _extra_value(word: str, option: str, takes: Takes) -> str:
    count = {0: "no value", 1: "one value"}.get(int(takes), f"{takes} values")
    return f"{word!r} belongs to no flag: {option} takes {count}"


def _value(flag: Flag, option: str, words: Sequence[str]) -> Any:
    """What a flag with these words sets; None if it sets nothing. Raises ValueError in words."""
    if flag.outcome == "refused":
        if words and all(
            any(_is_same(word, each) for each in flag.accepted_values) for word in words
        ):
            return None
        raise ValueError(f"{' '.join([option, *words])} is not supported: {flag.explanation}")
    if flag.outcome == "dropped" and flag.takes == "*":
        return None
    if flag.takes == 0:
        return flag.const
    if len(words) < (1 if flag.takes == "*" else int(flag.takes)):
        wanted = "a value" if flag.takes in (1, "*") else f"{flag.takes} values, not {len(words)}"
        raise ValueError(f"{option} needs {wanted}: {flag.usage}")
    if flag.outcome == "dropped":
        return None
    values = tuple(_converted(flag, option, word) for word in words)
    return values[0] if flag.takes == 1 else values


def _is_same(word: str, other: str) -> bool:
    try:
        return float(word) == float(other)
    except ValueError:
        return word == other


def _converted(flag: Flag, option: str, word: str) -> Any:
    if not word.strip():
        raise ValueError(f"{option} has an empty value")
    if flag.kind is int:
        return _whole(option, word)
    if flag.kind is float:
        try:
            return float(word)
        except ValueError:
            raise ValueError(f"{option} {word}: must be a number") from None
    chosen = flag.synonyms.get(word, word)
    if flag.choices and chosen not in flag.choices:
        raise ValueError(_not_among(flag, option, word))
    return chosen


def _whole(option: str, word: str) -> int:
    """A whole number, also one that is written 1e6 or 1000.0."""
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not number.is_integer() or abs(number) > LARGEST_EXACT:
        raise ValueError(f"{option} {word}: must be a whole number")
    return int(number)


def _not_among(flag: Flag, option: str, word: str) -> str:
    known_elsewhere = REFUSED_VALUES.get(flag.field, {})
    if word in known_elsewhere:
        return f"{option} {word} is not supported: {known_elsewhere[word]}"
    lowered = {each.lower(): each for each in (*flag.synonyms, *flag.choices)}
    near = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.6)
    hint = f"; did you mean {lowered[near[0]]}?" if near else ""
    return f"{option} {word}: must be one of {', '.join(flag.choices)}{hint}"


def _resolve(given: list[GivenFlag]) -> tuple[dict[str, Any], list[str]]:
    """The values by field, and the flags that give one field different values."""
    problems = []
    values: dict[str, Any] = {}
    first: dict[str, GivenFlag] = {}
    # It says that there is no learned table, which leaves the other kinds their place.
    last = [each for each in given if dashed(each.option) == "no-position-embedding"]
    for each in [*(each for each in given if each not in last), *last]:
        name = each.flag.field
        if each in last and values.get(name) in ("rope", "alibi"):
            continue
        if name in values and values[name] != each.value:
            problems.append(f"{_shown(first[name])} and {_shown(each)} contradict each other")
        first.setdefault(name, each)
        values[name] = each.value
    if (
        any(dashed(each.option) == "glu-activation" for each in given)
        and "hidden_size" in values
        and "ffn_hidden_size" not in values
    ):
        values["ffn_hidden_size"] = 4 * values["hidden_size"]
    return values, problems


def _shown(given: GivenFlag) -> str:
    return " ".join((given.option, *given.words))


def _config(values: dict[str, Any]) -> Config:
    groups = {}
    for name, group in GROUPS.items():
        names = {item.name for item in dataclasses.fields(group)}
        groups[name] = group(**{key: values[key] for key in names & values.keys()})
    return Config(**groups, given=frozenset(values))


def _flags_in(line: str) -> set[str]:
    """The flags that a message names, with dashes between the words."""
    return {dashed(name) for name in re.findall(r"--[A-Za-z][\w-]*", line)}
