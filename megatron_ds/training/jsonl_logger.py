"""One JSON object per step and per evaluation, in a file that survives crashes and resumes.

A resumed run takes out what an earlier process wrote beyond the checkpoint, so that every step
stands in the file once. The keys are documented in docs/logging.md. This file knows no torch.
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

from megatron_ds.fileio.atomic import atomic_write
from megatron_ds.training.records import EvalRecord, Logger, StepRecord


def to_line(values: Mapping[str, Any]) -> str:
    """A JSON line; numbers that JSON does not have (nan, inf) become null."""
    known = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
    return json.dumps(known, allow_nan=False) + "\n"


def read_up_to(path: Path, iteration: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines up to an iteration, with their objects; a last line that is torn is left out.

    Raises ValueError for a line that is no record.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                done = int(record["iteration"])
            except (ValueError, TypeError, KeyError):
                if not line.endswith("\n"):
                    return
                raise ValueError(
                    f"{path} line {number} is not a record of this program: move the file away, "
                    "or name another one with --metrics-jsonl"
                ) from None
            if done <= iteration:
                yield line.rstrip("\n") + "\n", record


def _free_name(path: Path) -> Path:
    """The file's name with the first number behind it that no older one has."""
    taken = {item.name for item in path.parent.iterdir()}
    return next(
        path.with_name(name)
        for number in itertools.count(1)
        if (name := f"{path.name}.{number}") not in taken
    )


class JsonLines(Logger):
    """Appends to a file; it is on disk (as far as the process is concerned) after each call.

    What a full or broken disk does not take is held and tried again with the next call: no reason
    for a run to die.

    iteration: where the run starts. Records beyond it are taken out; a run that starts from 0
    keeps what it finds as `<path>.1`, or under the next number that is free. warn: prints a line.
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
        self._held = b""

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        self._write("".join(to_line(dataclasses.asdict(record)) for record in records))

    def log_eval(self, record: EvalRecord) -> None:
        line = to_line(
            {
                "iteration": record.iteration,
                **({"group": record.group} if record.group else {}),
                f"{record.split}_loss": record.loss,
                "ppl": record.ppl,
            }
        )
        # A run that ended on an evaluation and is started again evaluates the same weights again.
        if line not in self._evaluations:
            self._evaluations.add(line)
            self._write(line)

    def close(self) -> None:
        self._write("")
        self._file.close()

    def _write(self, text: str) -> None:
        was_whole = not self._held
        self._held += text.encode()
        try:
            while self._held:
                self._held = self._held[self._file.write(self._held) :]
        except OSError as error:
            if was_whole:
                self._warn(
                    f"WARNING: {self._file.name} takes no more records ({error}); they are held "
                    "in memory and written when it does"
                )

    def _truncate_after(self, path: Path, iteration: int) -> None:
        """Rewrites the file without the records of later iterations, all of it or nothing."""
        with atomic_write(path) as file:
            for line, record in read_up_to(path, iteration):
                file.write(line.encode())
                if "lm_loss" not in record:
                    self._evaluations.add(line)
