"""Expansions of parameters that change a value, and arithmetic."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from contextlib import suppress

from megatron_ds.cli.doctor.shell.marks import OPENED, glob_of

BRACES = re.compile(
    r"(?as)\$\{(?P<prefix>[#!]?)(?P<name>\w+|[@*#])(?:\[(?P<index>[^\]]+)\])?"
    r"(?:(?P<operator>:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:)(?P<word>.*))?\}"
)
DEFAULTS = ("-", "=", "+", "?")
ARITHMETIC = re.compile(r"(?!.*(?:\*\*|<<))[\d\s+*/%()<>=!-]+", re.DOTALL)
LONGEST_EXPRESSION = 1000
"""Characters of an expression, so that its value has fewer digits than Python converts."""
LONGEST_VALUE = 2000
"""Characters of a value whose ends are compared with a pattern: the time grows with the square."""


def arithmetic(text: str) -> int | None:
    """The value of an expression with integers; None if it is not understood."""
    if len(text) > LONGEST_EXPRESSION or not ARITHMETIC.fullmatch(text):
        return None
    errors = (SyntaxError, TypeError, ArithmeticError, ValueError, MemoryError, RecursionError)
    with suppress(*errors):
        # Nothing but digits and operators.
        return int(eval(text.strip().replace("/", "//"), {"__builtins__": {}}))
    return None


def changed(value: str, operator: str, word: str) -> str | None:
    """A value as `${NAME%word}` and the like change it; None if this is not known.

    Args:
        value: The value.
        operator: Operator between the name and the word.
        word: The expanded word, in which quoted characters are marked.
    """
    if OPENED.search(value + word):
        return None
    if operator[0] in "^,":
        change = str.upper if operator[0] == "^" else str.lower
        return (
            None if word else change(value) if len(operator) == 2 else change(value[:1]) + value[1:]
        )
    if operator[0] == "/":
        return _replaced(value, word, everywhere=operator == "//")
    if len(value) > LONGEST_VALUE:
        return None
    ends = range(len(value) + 1)
    if operator[0] == "#":
        matches = re.compile(fnmatch.translate(glob_of(word))).match
        cuts = [end for end in ends if matches(value[:end])]
        return value[cuts[-1 if operator == "##" else 0] :] if cuts else value
    matches = re.compile(fnmatch.translate(glob_of(word))).match
    cuts = [start for start in ends if matches(value[start:])]
    return value[: cuts[0 if operator == "%%" else -1]] if cuts else value


def _replaced(value: str, word: str, *, everywhere: bool) -> str | None:
    """A value in which a text is replaced; a pattern is not looked for."""
    pattern, _, new = word.partition("/")
    text = glob_of(pattern)
    if re.search(r"[*?\[\\]", text) or text[:1] in ("#", "%") or not text:
        return None
    return value.replace(text, glob_of(new), -1 if everywhere else 1)


def sliced(values: Sequence[str], word: str) -> list[str] | None:
    """The characters or elements of `${NAME:start:count}`; None if these are not known."""
    start, *rest = word.split(":")
    first = arithmetic(start)
    count = arithmetic(rest[0]) if rest else len(values)
    if first is None or count is None or len(rest) > 1:
        return None
    first = max(0, first + len(values)) if first < 0 else first
    return [*values[first : first + count if count >= 0 else count]]
