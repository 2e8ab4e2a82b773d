"""Conditions of `test`, `[` and `[[`."""

from __future__ import annotations

import fnmatch
import operator
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from megatron_ds.cli.doctor.shell.marks import OPENED, without_unset

INVERSE: dict[bool | None, bool] = {True: False, False: True}
COMPARISONS = ("-eq", "-ne", "-lt", "-le", "-gt", "-ge")
"""Comparisons that Python's module operator has by the same names."""
MOST_ITEMS = 200
"""Words of a condition whose value is looked for."""
FILE_TESTS: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("-e", "-r", "-s", "-w", "-x"), os.path.exists),
    "-d": os.path.isdir,
    "-f": os.path.isfile,
    **dict.fromkeys(("-L", "-h"), os.path.islink),
}


@dataclass(frozen=True)
class Condition:
    """A condition as it is written, on which what follows depends."""

    text: str = ""
    asks_for_files: bool = False


@dataclass
class Conditions:
    """The conditions on which the command that is read depends.

    Attributes:
        stack: The conditions around it, the innermost one last.
        last: The last condition that was read.
        is_left: Whether an `exit` was reached that is not executed.
        loops: Number of loops around it that `break` can end.
        subshells: Number of subshells around it, whose `exit` does not end the script.
    """

    stack: list[Condition] = field(default_factory=list)
    last: Condition = Condition()
    is_left: bool = False
    loops: int = 0
    subshells: int = 0

    def join(self, before: Condition) -> None:
        """Makes the last condition depend on files if the one before it does."""
        asks_for_files = self.last.asks_for_files or before.asks_for_files
        self.last = replace(self.last, asks_for_files=asks_for_files)


def asks_for_files(items: Collection[str]) -> bool:
    """Whether the value of a condition depends on files."""
    return any(item in FILE_TESTS for item in items)


def is_true(items: Sequence[str], written: Collection[str]) -> bool | None:
    """The value of a condition, None if it is not known; the script has `written` some files."""
    if len(items) > MOST_ITEMS:
        return None
    items = [*map(without_unset, items)]
    for word, decisive in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if word in items[1:]:
            index = items.index(word, 1)
            sides = (is_true(items[:index], written), is_true(items[index + 1 :], written))
            return decisive if decisive in sides else None if None in sides else not decisive
    if items[:1] == ["!"]:
        return INVERSE.get(is_true(items[1:], written))
    if any(map(OPENED.search, items)):
        return None
    match items:
        case [value] | ["-n", value]:
            return bool(value)
        case ["-z", value]:
            return not value
        case [test, path] if test in FILE_TESTS:
            return path in written or FILE_TESTS[test](path)
        case [left, "=" | "==" | "!=" as sign, right]:
            return fnmatch.fnmatchcase(left, right) is (sign != "!=")
        case [left, sign, right] if sign in COMPARISONS:
            with suppress(ValueError):
                return bool(getattr(operator, sign[1:])(int(left or 0), int(right or 0)))
    return None
