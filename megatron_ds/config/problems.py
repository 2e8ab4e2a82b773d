"""Problems that a user can fix: a code, the option fields concerned, and a message.

Messages are data: the `messages.toml` of a folder has the text of each code that the folder uses,
`config/messages.toml` of codes that several folders use. Code and tests identify a problem by its
code and fields, and improving a message changes nothing else.
"""

from __future__ import annotations

import functools
import re
import string
import tomllib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ds.dataclass import dataclass

PACKAGE = Path(__file__).parents[1]
PROBLEMS_SHOWN = 20
"""Problems of the same kind that are listed at once; further ones are counted."""
SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1, "bytes"))
USER_INFORMATION = re.compile(r"(://)[^/?#\s'\"]*@")
"""The user information of a URL (RFC 3986), before the last @ of its authority."""
MARKER = re.compile("\x02([a-z0-9_]+)\x03")


def ignore(*values: object) -> None:
    """Accepts what a function reports; the default of callbacks."""


def option(field: str) -> str:
    """A reference to an option field, for use in a message.

    A field may have different flags in different tools. `Problem.render` replaces the reference by
    the flag of the tool that was called, `str` by the default flag of the field.
    """
    return f"\x02{field}\x03"


def default_flag(field: str) -> str:
    """The flag that a field's name gives: `seq_length` is `--seq-length`."""
    return f"--{field.replace('_', '-')}"


def without_passwords(value: Any) -> Any:
    """A text in which `***` replaces the user information of URLs, or a value made of such texts.

    What is printed or saved goes through this: `http://user:password@host/data` appears as
    `http://***@host/data`.
    """
    if isinstance(value, str):
        return USER_INFORMATION.sub(r"\1***@", value) if "://" in value else value
    if isinstance(value, dict):
        return {without_passwords(key): without_passwords(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_passwords, value))
    return value


def with_flags(text: str, flag_of: Callable[[str], str] = default_flag) -> str:
    """A text in which each reference of `option` is a flag, by default the field's."""
    return MARKER.sub(lambda match: flag_of(match[1]), text)


def with_value(settings: object, field: str) -> str:
    """A field's flag and value as on a command line: `--rampup-batch-size 4 4 100`."""
    value = getattr(settings, field)
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([option(field), *map(str, values)])


def plural(noun: str) -> str:
    return f"{noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def counted(count: int, noun: str, form: str = "") -> str:
    """A number with its noun: `1 token`, `2 tokens`.

    Args:
        count: Number of items.
        noun: Its singular.
        form: Format of the number, such as `,`.
    """
    return f"{count:{form}} {noun if count == 1 else plural(noun)}"


def sized(num_bytes: float) -> str:
    """A number of bytes in short: `1.23 GB`."""
    value, unit = next(
        (num_bytes / scale, unit) for scale, unit in SIZES if abs(num_bytes) >= scale or scale == 1
    )
    return f"{value:,.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} {unit}"


class _Formatter(string.Formatter):
    """`str.format`, in which `{tokens:, token}` is the number with its noun."""

    def format_field(self, value: Any, format_spec: str) -> str:
        form, space, noun = format_spec.partition(" ")
        return counted(value, noun, form) if space else format(value, format_spec)


class _Option:
    """Shows the flag of a field that a message names after a colon: `{option:seq_length}`."""

    def __format__(self, field: str) -> str:
        return option(field)


@dataclass(frozen=True)
class _Settings:
    """Shows a field's flag and value, `{settings:seq_length}`, or a bare value,
    `{settings.seq_length}`."""

    options: object

    def __format__(self, field: str) -> str:
        return with_value(self.options, field)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.options, name)


@functools.cache
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Text and fields of every code, of all folders."""
    return {code: entry for text in _texts() for code, entry in _entries(text).items()}


@functools.cache
def _texts() -> tuple[str, ...]:
    """The contents of the messages.toml of all folders."""
    files = sorted(PACKAGE.glob("*/messages.toml"))
    return tuple(path.read_text(encoding="utf-8") for path in files)


@functools.cache
def _entries(text: str) -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(text)


def _entry(code: str) -> Mapping[str, Any]:
    """Text and fields of a code. Parses its folder's file alone, as that of all takes long.

    Raises:
        KeyError: If no messages.toml has the code.
    """
    for text in _texts():
        if f"[{code}]" in text and code in _entries(text):
            return _entries(text)[code]
    raise KeyError(code)


@dataclass(frozen=True, init=False)
class Problem:
    """A message for the user, with a code that identifies its kind.

    Args:
        code: Kind of the problem, a key of a messages.toml.
        fields: Names of the option fields concerned, unless the entry has them.
        settings: Object with the fields that the message shows with their values, as in
            `{settings:seq_length}`.
        values: Values of the other placeholders, which may name attributes, as in `{file.prefix}`.
            `{fields[0]}` is the first field, and `{flag}` by default its flag.

    Raises:
        KeyError: If no messages.toml has the code, or a placeholder has no value.
    """

    code: str
    fields: tuple[str, ...]
    template: str
    """Message, in which `option` refers to fields."""

    def __init__(self, code: str, *fields: str, settings: object = None, **values: object) -> None:
        entry = _entry(code)
        fields = fields or tuple(entry.get("fields", ()))
        if fields:
            values.setdefault("flag", option(fields[0]))
        references = {"option": _Option(), "settings": _Settings(settings), "fields": fields}
        template = _Formatter().format(entry["text"], **references, **values)
        vars(self).update(code=code, fields=fields, template=template)

    @classmethod
    def of(cls, code: str, text: str, *fields: str) -> Problem:
        """A problem with a text of its own.

        Args:
            code: Kind of the problem.
            text: Message, in which `option` refers to fields.
            fields: Names of the option fields concerned.
        """
        problem = cls.__new__(cls)
        vars(problem).update(code=code, fields=fields, template=text)
        return problem

    def __str__(self) -> str:
        return str(without_passwords(with_flags(self.template)))

    def __contains__(self, text: str) -> bool:
        """Whether the message shows a text."""
        return text in str(self)

    @property
    def mentioned(self) -> frozenset[str]:
        """The fields concerned and those that the message refers to."""
        return frozenset((*self.fields, *MARKER.findall(self.template)))

    def extended(self, text: str) -> Problem:
        """Returns the problem with text appended."""
        return self.of(self.code, self.template + text, *self.fields)

    def with_prefix(self, prefix: str, *fields: str) -> Problem:
        """Returns the problem with a prefix such as a flag or a path, and further fields."""
        return self.of(self.code, prefix + self.template, *fields, *self.fields)

    def about(self, **fields: str) -> Problem:
        """Returns the problem of other fields.

        Args:
            fields: New field by field.
        """
        text = with_flags(self.template, lambda field: option(fields.get(field, field)))
        return self.of(self.code, text, *(fields.get(name, name) for name in self.fields))

    def render(self, flag_of: Callable[[str], str] = default_flag) -> str:
        """The message and the code, with the flags of a tool.

        Args:
            flag_of: Gives the flag of a field.
        """
        return f"{without_passwords(with_flags(self.template, flag_of))} [{self.code}]"


class UserError(ValueError):
    """One or more problems that end a program with a message and without a traceback."""

    problems: tuple[Problem, ...]

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.problems


def user_error(code: str, *fields: str, **values: Any) -> UserError:
    """The error of one problem; see `Problem` for the arguments."""
    return UserError(Problem(code, *fields, **values))


class ProblemWarning(UserWarning):
    """A Python warning of a problem."""


def warn_of(problem: Problem, stacklevel: int = 2) -> None:
    """Issues a Python warning; see `warnings.warn`."""
    warnings.warn(ProblemWarning(problem), stacklevel=stacklevel + 1)


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raises a `UserError` with all problems, if there are any."""
    listed = tuple(problems)
    if listed:
        raise UserError(*listed)


@contextmanager
def renaming_fields(**fields: str) -> Iterator[None]:
    """Lets the errors of the block be about other fields; see `Problem.about`."""
    try:
        yield
    except UserError as error:
        renamed = UserError(*(problem.about(**fields) for problem in error.problems))
        for note in getattr(error, "__notes__", ()):
            renamed.add_note(note)
        raise renamed from error


@contextmanager
def collect(problems: list[Problem]) -> Iterator[None]:
    """Appends the problems of a `UserError` in the body to a list, instead of raising it."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)
