"""What unit tests share: running a tool, and an output without a reader."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture
def run(request: pytest.FixtureRequest, run_tool: Run) -> Run:
    """Runs `TOOL` of the test's module in this process."""
    return functools.partial(run_tool, request.module.TOOL)


@contextlib.contextmanager
def closed_stdout() -> Iterator[None]:
    """Replaces the standard output by one whose reader has exited."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed, contextlib.redirect_stdout(closed):
        yield
