"""What unit tests share: running a tool, and an output without a reader."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

MEMORY = Path("/dev/shm")
"""A folder of Linux whose files are in memory."""
NEEDED_BYTES = 1 << 30
"""Free memory there with which the tests use it; they need less than a tenth."""


def pytest_configure() -> None:
    """Put temporary folders in memory: the tests write thousands of files and wait for each."""
    is_usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    if is_usable and shutil.disk_usage(MEMORY).free >= NEEDED_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """A temporary folder that is not in memory if the system's one is not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


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
