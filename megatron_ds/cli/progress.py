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
        due = log_interval

        def print_line(documents: int, input_bytes: int, description: str) -> None:
            nonlocal due
            if documents >= due:
                due = (documents // log_interval + 1) * log_interval
                print(description, file=sys.stderr, flush=True)

        yield print_line
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task(task, total=total_bytes)

        def update(documents: int, input_bytes: int, description: str) -> None:
            bar.update(shown, completed=input_bytes, description=description)

        yield update
