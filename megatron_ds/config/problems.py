"""Problems that a user can fix: a code, the option fields concerned, and a message.

Code and tests identify a problem by its code and fields; the message is free to be improved. All
messages are listed in tests/golden/messages.txt, which `python tools/make_messages.py` rewrites.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MARKER = re.compile("\x02([a-z0-9_]+)\x03")


def option(field: str) -> str:
    """A reference to an option field, for use in a message.

    A field may have different flags in different tools. `Problem.render` replaces the reference by
    the flag of the tool that was called, `str` by the default flag of the field.
    """
    return f"\x02{field}\x03"


def default_flag(field: str) -> str:
    """The flag that a field's name gives: `seq_length` is `--seq-length`."""
    return f"--{field.replace('_', '-')}"


class Problem(str):
    """A message for the user, with a code that identifies its kind.

    Args:
        code: Kind of the problem, in lower case with dashes. Unique in the package.
        text: Message: what is wrong, with the value, and what would be valid. Names fields of
            options by `option`.
        fields: Names of the option fields concerned.
    """

    code: str
    fields: tuple[str, ...]
    _template: str

    def __new__(cls, code: str, text: str, *fields: str) -> Problem:
        problem = super().__new__(cls, MARKER.sub(lambda found: default_flag(found[1]), text))
        problem.code = code
        problem.fields = fields
        problem._template = text
        return problem

    def extended(self, text: str) -> Problem:
        """The same problem with text appended."""
        return type(self)(self.code, self._template + text, *self.fields)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.code, self._template, *self.fields)

    def with_prefix(self, prefix: str, *fields: str) -> Problem:
        """The same problem, with a prefix such as a flag or a path, and further fields."""
        return Problem(self.code, f"{prefix}{self._template}", *fields, *self.fields)

    def about(self, **fields: str) -> Problem:
        """The same problem of other fields.

        Args:
            fields: New field by field.
        """
        text = MARKER.sub(lambda found: option(fields.get(found[1], found[1])), self._template)
        return type(self)(self.code, text, *(fields.get(name, name) for name in self.fields))

    def render(self, flag_of: Callable[[str], str] = default_flag) -> str:
        """The message and the code, with the flags of a tool.

        Args:
            flag_of: Gives the flag of a field.
        """
        return f"{MARKER.sub(lambda found: flag_of(found[1]), self._template)} [{self.code}]"


class UserError(ValueError):
    """One or more problems that end a program with a message and without a traceback."""

    problems: tuple[Problem, ...]

    def __init__(self, *problems: Problem) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.problems


def raise_if_any(problems: Iterable[Problem]) -> None:
    """Raises a `UserError` with all problems, if there are any."""
    found = tuple(problems)
    if found:
        raise UserError(*found)


@contextmanager
def collect(problems: list[Problem]) -> Iterator[None]:
    """Appends the problems of a `UserError` in the body to a list, instead of raising it."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)
