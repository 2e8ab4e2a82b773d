"""Writes what happened to a run besides its steps: starts, checkpoints, warnings, its end.

One JSON object per line in `events.jsonl` of the --save folder, next to `metrics.jsonl`; see
docs/running/logging.md. A resumed run appends, so every start is in the file. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.training.loggers.jsonl_logger import always, to_line
from megatron_ds.training.loggers.record_file import free_name

EVENTS = "events.jsonl"
"""File of a --save folder."""
WARNING = "WARNING: "
EARLY = 100
"""Events that are kept until the file is open, the last ones."""


class EventLog:
    """Events of a run. Until `start`, and where it is not called, nothing is written.

    Args:
        warn: Prints a line. After an error of the disk, events are kept until they can be written.
        clock: Seconds since 1970.

    Attributes:
        may_write: Whether the folder still belongs to this run. Until it does, events are kept.
    """

    def __init__(
        self, warn: Callable[[str], object] = print, clock: Callable[[], float] = time.time
    ) -> None:
        self.may_write: Callable[[], bool] = always
        self._warn = warn
        self._clock = clock
        self._path: Path | None = None
        self._early: deque[str] = deque(maxlen=EARLY)
        self._unwritten = b""
        self._iteration = 0

    def start(self, folder: Path, config: Config, iteration: int, **values: Any) -> None:
        """Opens the file, and records the start of a run, then the events so far.

        Args:
            folder: The --save folder. A run that starts from 0 renames an existing file, as
                `metrics.jsonl`.
            config: Configuration of the run.
            iteration: Iteration from which the run starts.
            values: Further values of the start.
        """
        path = folder / EVENTS
        self._path = path
        self._iteration = iteration
        early = self._early
        self._early = deque()
        try:
            if iteration == 0 and path.is_file():
                os.replace(path, free_name(path))
        except OSError as error:
            self._path = None
            self._early = deque(maxlen=0)
            self._print("logger-disabled", path, error)
        self.record("start", **values, config=config.to_dict())
        for line in early:
            self._write(line)

    def record(self, event: str, iteration: int | None = None, **values: Any) -> None:
        """Writes an event, in one call, so that lines are complete unless the process dies in it.

        Args:
            event: Kind of the event.
            iteration: Iteration after which it happened; None: the last step.
            values: Further values.
        """
        done = self._iteration if iteration is None else iteration
        head = {"event": event, "iteration": done, "time": round(self._clock(), 3)}
        line = to_line(head | values)
        if self._path is None:
            self._early.append(line)
        else:
            self._write(line)

    def step(self, iteration: int) -> None:
        """Sets the iteration of later events that name none; writes nothing."""
        self._iteration = iteration

    def warning(self, text: str) -> None:
        """Records a printed line if it is a warning."""
        if text.lstrip().startswith(WARNING):
            self.record("warning", text=text.strip().removeprefix(WARNING))

    def _write(self, line: str) -> None:
        if (path := self._path) is None:
            return
        was_empty = not self._unwritten
        self._unwritten += line.encode()
        if not self.may_write():
            return
        try:
            with path.open("ab", buffering=0) as file:
                while self._unwritten:
                    self._unwritten = self._unwritten[file.write(self._unwritten) :]
        except OSError as error:
            if was_empty:
                self._print("metrics-jsonl-unwritable", path, error)

    def _print(self, code: str, path: Path, error: OSError) -> None:
        self._warn(f"{WARNING}{Problem(code, name=path, error=error).render()}")
