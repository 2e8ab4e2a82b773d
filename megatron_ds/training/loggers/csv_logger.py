"""Writes a table of comma-separated values, one row per step and per evaluation.

A resumed run continues the file as it continues metrics.jsonl. Imports no torch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ds.fileio.atomic import atomic_write
from megatron_ds.training.loggers.record_file import continue_file
from megatron_ds.training.records import RowLogger


class CsvTable(RowLogger):
    """Appends to a file without buffering; unknown values are empty.

    Columns are added as metrics appear: the file is then rewritten, atomically.

    Args:
        path: File to append to, continued as by `continue_file`.
        iteration: Iteration from which the run starts.
        warn: Prints a line.

    Raises:
        OSError: If the file cannot be written, here and in every method.
    """

    def __init__(self, path: Path, iteration: int, warn: Callable[[str], object] = print) -> None:
        self._path = path
        self._columns = list[str]()
        self._evaluations: set[tuple[tuple[str, str], ...]] = set()
        continue_file(path, iteration, partial(self._keep, iteration), warn)
        self._file = path.open("ab", buffering=0)

    def write_row(self, values: Mapping[str, Any]) -> None:
        if "lm_loss" not in values:
            # A finished run that is started again repeats the evaluation of the same weights.
            if (key := _key(values)) in self._evaluations:
                return
            self._evaluations.add(key)
        if not values.keys() <= set(self._columns):
            self._add_columns([name for name in values if name not in self._columns])
        self._write([values.get(name) for name in self._columns])

    def close(self) -> None:
        self._file.close()

    def _add_columns(self, names: list[str]) -> None:
        count = len(self._columns)
        self._columns += names
        if not count or not self._path.is_file():
            self._write(self._columns)
            return
        with self._path.open(encoding="utf-8") as rows, atomic_write(self._path) as file:
            file.write(_line(self._columns))
            next(rows)
            for row in rows:
                file.write(row.rstrip("\n").encode() + b"," * len(names) + b"\n")
        self._file.close()
        self._file = self._path.open("ab", buffering=0)

    def _write(self, values: Iterable[object]) -> None:
        line = _line(values)
        while line:  # a write may be short; of a full disk, the next one fails
            line = line[self._file.write(line) :]

    def _keep(self, iteration: int, line: str) -> bool:
        try:
            (row,) = csv.reader([line])
        except csv.Error as error:
            raise ValueError(str(error)) from error
        if not self._columns:
            if "iteration" not in row:
                raise ValueError("not a header")
            self._columns = row
            return True
        values = dict(zip(self._columns, row, strict=True))
        is_kept = int(values["iteration"]) <= iteration
        if is_kept and not values.get("lm_loss"):
            self._evaluations.add(_key(values))
        return is_kept


def _key(values: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """The values of a row as they are read back, without empty ones."""
    return tuple((name, str(value)) for name, value in values.items() if value not in (None, ""))


def _line(values: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()
