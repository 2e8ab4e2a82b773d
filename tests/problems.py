"""Assertions about problems by code and fields, so that no test repeats a message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from megatron_ds.config.problems import Problem, UserError


def codes(problems: Iterable[Problem | str]) -> list[str]:
    """The codes of problems, in order. Fails for a message without a code."""
    found = list(problems)
    plain = [problem for problem in found if not isinstance(problem, Problem)]
    assert not plain, f"messages without a code: {plain}"
    return [problem.code for problem in found if isinstance(problem, Problem)]


def fields(problems: Iterable[Problem | str]) -> list[tuple[str, ...]]:
    """The fields of problems, in order."""
    return [problem.fields for problem in problems if isinstance(problem, Problem)]


class Raised:
    """What `raises_problem` has caught."""

    problem: Problem


@contextmanager
def raises_problem(code: str, *names: str, contains: str = "") -> Iterator[Raised]:
    """Expects one `UserError` with one problem of this code.

    Args:
        code: Expected code.
        names: Expected fields; not compared if empty.
        contains: A value that the message must show, such as a path or a number; never wording.
    """
    result = Raised()
    with pytest.raises(UserError) as raised:
        yield result
    assert codes(raised.value.problems) == [code], str(raised.value)
    result.problem = raised.value.problems[0]
    if names:
        assert result.problem.fields == names
    assert contains in str(result.problem)


def printed_codes(text: str) -> list[str]:
    """The codes at the ends of printed lines, in order."""
    return re.findall(r" \[([a-z0-9-]+)\]$", text, flags=re.MULTILINE)
