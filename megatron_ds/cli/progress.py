"""Progress of a long job on the standard error: a bar at a terminal, lines in logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Update = Callable[[int, int, str], None]
"""Called with the documents and input bytes so far, and a description of them."""


@contextmanager
def progress(task: str, total_bytes: int | None, log_interval: int) -> Iterator[Update]:
    """Report the progress of a job.

    Args:
        task: Name of the job, shown before the first update.
        total_bytes: Size of the input; None if unknown.
        log_interval: Documents between lines if the standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield _LineReport(log_interval)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task(task, total=total_bytes)

        def update(documents: int, input_bytes: int, description: str) -> None:
            bar.update(shown, completed=input_bytes, description=description)

        yield update


class _LineReport:
    """Prints a line whenever another `interval` of documents is complete."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._next = interval

    def __call__(self, documents: int, input_bytes: int, description: str) -> None:
        if documents >= self._next:
            self._next = (documents // self._interval + 1) * self._interval
            print(description, file=sys.stderr, flush=True)
