"""Progress of a long job on the standard error: a bar at a terminal, lines in logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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


@dataclass
class TensorCount:
    """The tensors that a tool has processed so far.

    Attributes:
        update: Shows the progress.
        total_bytes: Bytes of all tensors.
        count: Number of tensors.
        num_bytes: Their bytes.
    """

    update: Update
    total_bytes: int
    count: int = 0
    num_bytes: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts a tensor of `num_bytes` bytes and reports the progress."""
        self.count += 1
        self.num_bytes += num_bytes
        size = self.num_bytes / 1e9
        total = self.total_bytes / 1e9
        self.update(
            self.count, self.num_bytes, f"{self.count} tensors, {size:.2f} of {total:.2f} GB"
        )


@contextmanager
def tensor_progress(task: str, total_bytes: int) -> Iterator[TensorCount]:
    """Report the progress of a job on tensors, which adds each of them to the count.

    Args:
        task: Name of the job, shown before the first tensor.
        total_bytes: Bytes of all tensors.
    """
    with progress(task, total_bytes, log_interval=100) as update:
        yield TensorCount(update, total_bytes)
