"""Writes one JSON object per step and per evaluation.

A resumed run removes the records after its checkpoint, so every step is in the file once, whatever
crashed before. docs/logging.md documents the keys. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.fileio.atomic import atomic_write
from megatron_ds.training.records import EvalRecord, Logger, StepRecord


def to_line(values: Mapping[str, Any]) -> str:
    """A JSON line; nan and inf, which JSON lacks, become null."""
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps(known, allow_nan=False) + "\n"


def step_values(record: StepRecord) -> dict[str, Any]:
    """The keys and values of a step, with its further metrics at the end."""
    values = dataclasses.asdict(record)
    extras: dict[str, float] = values.pop("extras")
    return values | extras


def read_up_to(path: Path, iteration: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Reads the records up to an iteration. An incomplete last line is left out.

    Yields:
        Each line and its object.

    Raises:
        UserError: For a line that is not a record.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                done = int(record["iteration"])
            except (ValueError, TypeError, KeyError):
                if not line.endswith("\n"):
                    return
                raise user_error("metrics-jsonl-foreign", path=path, number=number) from None
            if done <= iteration:
                yield line.rstrip("\n") + "\n", record


def _free_name(path: Path) -> Path:
    """The name of the file with the first number appended that is not in use."""
    taken = {item.name for item in path.parent.iterdir()}
    return next(
        path.with_name(name)
        for number in itertools.count(1)
        if (name := f"{path.name}.{number}") not in taken
    )


class JsonLines(Logger):
    """Appends to a file without buffering, so that a crash of the process loses nothing.

    If the disk is full or fails, lines are kept in memory and written with the next call; the run
    continues.

    Args:
        path: File to append to.
        iteration: Iteration from which the run starts. Later records are removed. A run that starts
            from 0 renames an existing file to `<path>.1`, or to the next free number.
        warn: Prints a line.
    """

    def __init__(self, path: Path, iteration: int, warn: Callable[[str], object] = print) -> None:
        self._evaluations: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and iteration == 0:
            os.replace(path, _free_name(path))
        elif path.exists():
            self._truncate_after(path, iteration)
        self._file = path.open("ab", buffering=0)
        self._warn = warn
        self._unwritten = b""

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        self._write("".join(to_line(step_values(record)) for record in records))

    def log_eval(self, record: EvalRecord) -> None:
        line = to_line(
            {
                "iteration": record.iteration,
                **({"group": record.group} if record.group else {}),
                f"{record.split}_loss": record.loss,
                "ppl": record.ppl,
            }
        )
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
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if was_empty:
                warning = Problem("metrics-jsonl-unwritable", name=self._file.name, error=error)
                self._warn(f"WARNING: {warning.render()}")

    def _truncate_after(self, path: Path, iteration: int) -> None:
        """Rewrites the file atomically without the records of later iterations."""
        with atomic_write(path) as file:
            for line, record in read_up_to(path, iteration):
                file.write(line.encode())
                if "lm_loss" not in record:
                    self._evaluations.add(line)
