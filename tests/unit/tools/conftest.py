"""Runs a tool in this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def run(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `TOOL` of the test's module, which must return `status`. Returns what it prints."""

    def run(*arguments: object, status: int = 0) -> Any:
        found = request.module.TOOL.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert found == status, printed
        return printed

    return run


@contextlib.contextmanager
def closed_stdout() -> Iterator[None]:
    """Replaces the standard output by one whose reader has exited."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, contextlib.redirect_stdout(closed):
        yield
