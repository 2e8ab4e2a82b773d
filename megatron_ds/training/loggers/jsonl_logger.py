"""Writes one JSON object per step and per evaluation.

A resumed run removes the records after its checkpoint, so every step is in the file once, whatever
crashed before. docs/running/logging.md documents the keys. Imports no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import Problem
from megatron_ds.training.loggers.record_file import continue_file
from megatron_ds.training.records import EvalRecord, Logger, StepRecord, TaskRecord, metrics_of


def always() -> bool:
    """The default of conditions on writing."""
    return True


def to_line(values: Mapping[str, Any]) -> str:
    """A JSON line; nan and inf, which JSON lacks, become null."""
    known = json.loads(json.dumps(values), parse_constant=lambda constant: None)
    return json.dumps(known) + "\n"


class JsonLines(Logger):
    """Appends to a file without buffering, so that a crash of the process loses nothing.

    If the disk is full or fails, lines are kept in memory and written with the next call; the run
    continues.

    Args:
        path: File to append to.
        iteration: Iteration from which the run starts. Later records are removed. A run that starts
            from 0 renames an existing file to `<path>.1`, or to the next free number. A device or a
            named pipe only receives the new records. If a line is not a record, the file is kept
            under such a name, too, and its records are copied.
        warn: Prints a line.
        may_write: Whether the file still belongs to this run. Until it does, lines are kept.
    """

    def __init__(
        self,
        path: Path,
        iteration: int,
        warn: Callable[[str], object] = print,
        may_write: Callable[[], bool] = always,
    ) -> None:
        self._evaluations: set[str] = set()
        self._path = path
        self._warn = warn
        self._may_write = may_write
        continue_file(path, iteration, partial(self._keep, iteration), warn)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.write(metrics_of(record))

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes an object, which has its `iteration`."""
        self._write(to_line(values))

    def log_eval(self, record: EvalRecord) -> None:
        group = {"group": record.group} if record.group else {}
        results = {f"{record.split}_loss": record.loss, "ppl": record.ppl, **record.extras}
        self._log_evaluation({"iteration": record.iteration, **group, **results})

    def log_task(self, record: TaskRecord) -> None:
        head = {"iteration": record.iteration, "task": record.task}
        self._log_evaluation(head | dict(record.metrics))

    def _log_evaluation(self, values: Mapping[str, Any]) -> None:
        line = to_line(values)
        # A finished run that is started again repeats the evaluation of the same weights.
        if line not in self._evaluations:
            self._evaluations.add(line)
            self._write(line)

    def close(self) -> None:
        self._write("")
        self._file.close()

    def _write(self, text: str) -> None:
        was_empty = not self._unwritten
        self._unwritten += text.encode()
        if not self._may_write():
            return
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:  # removed, perhaps with its folder
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("ab", buffering=0)
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if was_empty:
                warning = Problem("metrics-jsonl-unwritable", name=self._file.name, error=error)
                self._warn(f"WARNING: {warning.render()}")

    def _keep(self, iteration: int, line: str) -> bool:
        record = json.loads(line)
        is_kept = int(record["iteration"]) <= iteration
        if is_kept and "lm_loss" not in record:
            self._evaluations.add(line)
        return is_kept
