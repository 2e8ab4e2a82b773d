"""Shows a run in progress in a terminal, from the files that it writes.

Owns the frames: progress, time left, curves, warnings and status. The run does not know of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from megatron_ds.config.problems import UserError, counted
from megatron_ds.reports.history import History, RunReader, Values
from megatron_ds.reports.tables import Status, duration, last_losses, seconds_per_step, status
from megatron_ds.reports.text_plot import braille

WARNINGS = 3
CURVES = (
    ("loss", "lm_loss", 6),
    ("tokens/s", "tokens_per_second", 3),
    ("learning rate", "learning_rate", 2),
)
"""Name, key and lines of each curve."""


@dataclass
class Follower:
    """A run whose files are read as they grow.

    Args:
        path: Its `metrics.jsonl`, or the folder with it.
        clock: Seconds since 1970.
    """

    path: Path
    clock: Callable[[], float] = time.time
    problem: str = field(default="", init=False)
    """Reason that the last `poll` could not read everything."""

    def __post_init__(self) -> None:
        self._reader = RunReader(self.path)
        self._written_at: float | None = None

    @property
    def history(self) -> History:
        return self._reader.history

    def poll(self) -> None:
        """Reads the new bytes. An error is kept in `problem`: a file of a network folder may be
        incomplete for a moment."""
        is_first = self._written_at is None
        self.problem = ""
        try:
            # Files of another machine have its times: the age is the age of the file's time only
            # until a new byte is seen.
            if self._reader.read():
                written = self._reader.metrics.stat().st_mtime if is_first else self.clock()
                self._written_at = min(written, self.clock())
        except FileNotFoundError:
            pass  # before the first step
        except UserError as error:
            self.problem = error.problems[0].render()
        except OSError as error:
            self.problem = str(error)

    @property
    def age(self) -> float:
        """Seconds since the run has written."""
        return 0.0 if self._written_at is None else self.clock() - self._written_at


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def frame(name: str, follower: Follower, width: int, *, has_dots: bool = True) -> RenderableType:
    """The picture of a run as it is now.

    Args:
        name: Name of the run.
        follower: Its history.
        width: Characters of a line.
        has_dots: Whether the terminal has the characters of curves.
    """
    run = follower.history
    now = status(follower.history, follower.age)
    style = "yellow" if now.is_late else "green" if not now.text.startswith("failed") else "red"
    parts: list[RenderableType] = [f"[bold]{escape(name)}[/]: [{style}]{escape(now.text)}[/]"]
    if len(run):
        parts += [*_progress(run, now, width), *_curves(run, width if has_dots else 0)]
    table = Table.grid(padding=(0, 2))
    for label, text in _lines(run):
        table.add_row(label, escape(text))
    parts.append(table)
    if follower.problem:
        parts.append(f"[red]{escape(follower.problem)}[/]")
    return Group(*parts)


def _progress(run: History, now: Status, width: int) -> Iterator[RenderableType]:
    """Bar, iterations and time left."""
    done = int(run["iteration"][-1])
    total = run.total_iterations
    pace = seconds_per_step(run)
    if not total:
        yield f"iteration {done:,}"
        return
    text = f"iteration {done:,} of {total:,} ({done / total:.0%})"
    if pace and not now.has_ended:
        text += f", {duration((total - done) * pace)} left at {pace:.3g} s per step"
    row = Table.grid()  # a bar alone has no end of its line
    row.add_row(ProgressBar(total=total, completed=done, width=min(width, 80)))
    yield from (row, text)


def _curves(run: History, width: int) -> Iterator[RenderableType]:
    """Curves over all steps, each with its last and extreme values; without width only these."""
    timed = run["warm_up"] != 1
    for name, key, height in CURVES:
        values: Values = run[key][timed] if key == "tokens_per_second" else run[key]
        values = values[~np.isnan(values)]
        if len(values):
            last, low, high = map(_number, (values[-1], values.min(), values.max()))
            yield f"[bold]{name}[/] {last} (between {low} and {high})"
            yield from braille(values.tolist(), min(width, 80), height if width else 0)


def _lines(run: History) -> Iterator[tuple[str, str]]:
    """Last validation, checkpoint and warnings, skipped steps and restarts."""
    if losses := last_losses(run, "validation"):
        iteration = run.losses("validation")[-1][0]
        shown = ", ".join(f"{group} {loss:.4f}".strip() for group, loss in losses.items())
        yield "validation", f"loss {shown} at iteration {iteration:,}"
    if run.checkpoints:
        yield "checkpoint", f"iteration {run.checkpoints[-1]:,}"
    yield from _slowest_rank(run)
    if len(run) and (skipped := np.nansum(run["skipped"])):
        yield "skipped", f"{skipped:,.0f} steps"
    if restarts := run.restarts:
        yield (
            "resumed",
            f"{counted(len(restarts), 'time')}, last at iteration {restarts[-1]['iteration']:,}",
        )
    for record in run.of("warning")[-WARNINGS:]:
        yield "warning", f"iteration {record['iteration']:,}: {record.get('text', '')}"


def _slowest_rank(run: History) -> Iterator[tuple[str, str]]:
    ranks = run["time/slowest_rank"]
    excess = run["time/slowest_rank_excess"]
    measured = np.flatnonzero(~np.isnan(ranks))
    if len(measured):
        last = measured[-1]
        iteration = int(run["iteration"][last])
        share = f"{excess[last]:.1%} above the median"
        yield "slowest rank", f"{ranks[last]:.0f}, {share} at iteration {iteration:,}"
