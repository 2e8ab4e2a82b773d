"""What unit tests share: imported objects that are never collected, and running a tool."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Run = Callable[..., Any]


def pytest_collection() -> None:
    # Until all files are imported, nothing is garbage.
    gc.disable()


def pytest_collection_finish() -> None:
    # The libraries are a million objects, which each collection of the oldest ones would visit.
    gc.enable()
    gc.collect()
    gc.freeze()


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
