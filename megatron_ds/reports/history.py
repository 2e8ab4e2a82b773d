"""Reads what runs have recorded: steps, evaluations, events and settings.

Owns the reader of `metrics.jsonl`, its table and `events.jsonl`. Draws nothing. Imports no torch.
"""

from __future__ import annotations

import csv
import functools
import json
import math
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.checkpoint.lineage import parent_of
from megatron_ds.checkpoint.metadata import RUN, WORLD_SIZES, iteration_of, list_checkpoints
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.training.loggers.events import EVENTS

METRICS = "metrics.jsonl"
"""File of a --save folder."""
Points = list[tuple[int, float]]
Values = npt.NDArray[np.float64]
AXES = ("iteration", "samples", "tokens", "flops", "time")
"""Horizontal axes of the charts; time is the sum over training steps in seconds."""
NAN = float("nan")
SYNONYMS = {
    "iteration": ("step",),
    "lm_loss": ("loss", "train_loss"),
    "validation_loss": ("val_loss", "eval_loss"),
}
"""Keys of other programs."""
runs_field = functools.partial(
    option_field,
    (),
    help="--save folder, metrics.jsonl or table (--metrics-csv) of each run; a run that continues "
    "another one begins with its curve",
    nargs="*",
    metavar="RUN",
    positional=True,
    required=True,
)
"""Declares the option of a tool that reads runs."""


class Evaluation(NamedTuple):
    """A validation or test, with its loss in nats per token."""

    iteration: int
    split: str
    group: str
    loss: float
    extras: Mapping[str, float] = MappingProxyType({})
    """Further metrics by name, such as `bits_per_byte`."""


class RecordFile:
    """Reads a file that may still grow, from where the last call has ended.

    A line is a JSON object or, if the first line names columns, comma-separated values.

    Args:
        path: The file, which need not exist yet.
        add: Called with each object. Its KeyError, TypeError or ValueError means that the object is
            not a record.
        reset: Called if the file was replaced, before it is read from its beginning.
        skip_damaged: Skip lines that are not records instead of raising an error.
    """

    def __init__(
        self,
        path: Path,
        add: Callable[[dict[str, Any]], object],
        reset: Callable[[], object],
        *,
        skip_damaged: bool = False,
    ) -> None:
        self.path = path
        self._add = add
        self._reset = reset
        self._skip_damaged = skip_damaged
        self._inode = -1
        self._offset = 0
        self._line = 0
        self._columns = list[str]()

    def read(self) -> int:
        """Reads what is new, except a line that is still being written; returns its bytes.

        Raises:
            UserError: If a line is not a record; the next call begins with it.
            OSError: If the file cannot be read.
        """
        with self.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode != -1 or stat.st_size < self._offset:
                self._offset = 0
                self._line = 0
                self._reset()
            self._inode = stat.st_ino
            before = self._offset
            file.seek(before)
            for line in file:
                try:
                    if line.strip() and (record := self._record(line.decode("utf-8-sig"))):
                        self._add(record)
                except (csv.Error, ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    if not line.endswith(b"\n"):
                        break
                    if not self._skip_damaged:
                        where = {"path": self.path, "line": self._line + 1}
                        raise user_error("metrics-line-invalid", **where) from None
                self._offset += len(line)
                self._line += 1
        return self._offset - before

    def _record(self, line: str) -> dict[str, Any]:
        """The object of a line; empty for the line of columns, or without a value."""
        if not self._columns and line.lstrip()[:1] in "{[":
            return {**json.loads(line)}
        (cells,) = csv.reader([line])
        if not self._line and {"iteration", *SYNONYMS["iteration"]} & {*cells}:
            self._columns = cells
            return {}
        if not line.endswith("\n"):
            raise ValueError("the last value may be incomplete")
        pairs = zip(self._columns, cells, strict=True)
        return {name: _value(cell) for name, cell in pairs if cell}


def _value(cell: str) -> float | str:
    try:
        return float({"True": "1", "False": "0"}.get(cell, cell))
    except ValueError:
        return cell


@dataclass
class History:
    """The records of a run so far.

    Attributes:
        columns: Numbers of the training steps by key, all of one length; unknown ones are nan.
        evaluations: Evaluations in order.
        events: The objects of `events.jsonl`, in their order.
        checkpoints: Iterations of the checkpoints that were complete, or are in the folder.
        settings: Arguments of the run's last start by option.
        layout_ranks: Ranks that have written the newest checkpoint; 0: unknown.
        parent: Run and iteration of which it is a fork.
        written: When the metrics were written, in seconds since 1970.
    """

    columns: dict[str, array[float]] = field(default_factory=dict)
    evaluations: list[Evaluation] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    layout_ranks: int = 0
    written: float = 0.0
    parent: str = ""

    def __len__(self) -> int:
        return len(self.columns.get("iteration", ()))

    def __getitem__(self, key: str) -> Values:
        """A column as a copy; all nan if no step has the key."""
        column = self.columns.get(key)
        return np.full(len(self), NAN) if column is None else np.array(column)

    def add(self, record: dict[str, Any]) -> None:
        """Adds an object of `metrics.jsonl`.

        Raises:
            KeyError, TypeError, ValueError: If it is not a record.
        """
        iteration = int(record["iteration"])
        for key, loss in record.items():
            name, _, group = key.partition("/")  # a table has the group in the key
            if name in ("validation_loss", "test_loss") and loss is not None:
                split = name.removesuffix("_loss")
                extras = _extras(record, split, group)
                group = group or str(record.get("group", ""))
                self.evaluations.append(Evaluation(iteration, split, group, float(loss), extras))
        if "lm_loss" not in record:
            return
        numbers = {
            key: NAN if value is None else float(value)
            for key, value in record.items()
            if key == "lm_loss" or not isinstance(value, str)
        }
        length = len(self)
        for key in numbers.keys() - self.columns.keys():
            self.columns[key] = array("d", [NAN]) * length
        for key, column in self.columns.items():
            column.append(numbers.get(key, NAN))

    def clear_steps(self) -> None:
        """Removes steps and evaluations."""
        self.columns.clear()
        self.evaluations.clear()

    def continued_by(self, other: History) -> History:
        """The history, followed by the history of a run that continues this one."""
        columns = {}
        for key in self.columns | other.columns:
            columns[key] = array("d", np.concatenate([self[key], other[key]]))
        return History(
            columns,
            self.evaluations + other.evaluations,
            self.events + other.events,
            sorted({*self.checkpoints, *other.checkpoints}),
            other.settings,
            other.layout_ranks,
            other.written,
            self.parent,
        )

    def points(self, key: str = "lm_loss") -> Points:
        """(iteration, value) of the steps whose value is known."""
        pairs = zip(self["iteration"].tolist(), self[key].tolist(), strict=True)
        return [(int(iteration), value) for iteration, value in pairs if value == value]

    def losses(self, split: str, group: str | None = None) -> Points:
        """(iteration, loss) of the evaluations of a group, or of all."""
        return [
            (item.iteration, item.loss)
            for item in self.evaluations
            if item.split == split and group in (None, item.group)
        ]

    def groups(self, split: str) -> list[str]:
        """Names of the evaluated datasets, "" for one without a name."""
        return list(dict.fromkeys(item.group for item in self.evaluations if item.split == split))

    def of(self, event: str) -> list[dict[str, Any]]:
        """The events of a kind."""
        return [record for record in self.events if record.get("event") == event]

    @property
    def restarts(self) -> list[dict[str, Any]]:
        """The starts that continued a checkpoint."""
        return [record for record in self.of("start") if record["iteration"] > 0]

    @property
    def ranks(self) -> Values:
        """Number of ranks of each step; nan if unknown."""
        ranks = np.full(len(self), float(self.layout_ranks or NAN))
        for start in self.of("start"):
            ranks[self["iteration"] > start["iteration"]] = start.get("ranks") or NAN
        return ranks

    @property
    def total_iterations(self) -> int | None:
        """Iterations of the run; None if unknown."""
        starts = self.of("start")
        total = starts[-1].get("total_iterations") if starts else self.settings.get("--train-iters")
        return None if total is None else int(total)

    def axis(self, name: str) -> Values:
        """Positions of the steps on an axis of AXES; nan where they are unknown."""
        if name in ("iteration", "samples", "tokens"):
            return self[name if name == "iteration" else f"consumed_{name}"]
        values = self["seconds"]
        if name == "flops":
            values = values * self["tflops"] * self.ranks * 1e12
        return np.where(np.isnan(values), NAN, np.nancumsum(values))

    def place(self, name: str, iterations: Sequence[float]) -> Values:
        """Positions of iterations, between steps of the run, on an axis."""
        known = ~np.isnan(self.axis(name))
        if not known.any():
            return np.full(len(iterations), NAN)
        return np.interp(iterations, self["iteration"][known], self.axis(name)[known])


def _extras(record: Mapping[str, Any], split: str, group: str) -> dict[str, float]:
    """The metrics of an evaluation besides loss and perplexity, by name.

    Args:
        record: An object, whose keys are their names; or a row of a table, where these begin with
            the split and end with the group.
        split: Split of the evaluation.
        group: Group of the evaluation, in a table.
    """
    end = f"/{group}" if group else ""
    is_row = f"{split}_ppl{end}" in record
    start, end = (f"{split}_", end) if is_row else ("", "")
    names = {
        key.removeprefix(start).removesuffix(end): value
        for key, value in record.items()
        if key.startswith(start) and key.endswith(end) and isinstance(value, (int, float))
    }
    others = ("iteration", "loss", "ppl", f"{split}_loss")
    return {name: float(value) for name, value in names.items() if name not in others}


def flat_settings(config: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The arguments of a run by option: `--hidden-size`."""
    return {
        "--" + name.replace("_", "-"): value
        for group in config.values()
        for name, value in group.items()
    }


class RunReader:
    """Reads the history of one run as its files grow.

    Args:
        path: Its `metrics.jsonl`, or the folder with it.
        until: Last iteration to read. None: all.
    """

    def __init__(self, path: Path, until: int | None = None) -> None:
        self.folder, file = (path, path / METRICS) if path.is_dir() else (path.parent, path)
        self.history = History()
        history = self.history
        self._until = float("inf") if until is None else until
        self._metrics = RecordFile(file, self._add_record, history.clear_steps)
        events = self.folder / EVENTS
        self._events = RecordFile(events, self._add_event, history.events.clear, skip_damaged=True)

    @property
    def metrics(self) -> Path:
        """The file of the metrics."""
        return self._metrics.path

    def read(self) -> int:
        """Adds what is new to `history`; returns the number of its bytes.

        Raises:
            UserError: If a line of the metrics is not a record.
            OSError: If a file cannot be read.
        """
        size = 0
        with suppress(FileNotFoundError):  # runs of older versions have none
            size += self._events.read()
        try:
            size += self._metrics.read()
            self.history.written = self.metrics.stat().st_mtime
            return size
        finally:
            self._read_folder()

    def _read_folder(self) -> None:
        """Checkpoints, and settings and ranks where no event has them."""
        history = self.history
        paths = list_checkpoints(self.folder)
        if parent := parent_of(self.folder):
            history.parent = "{} at {}".format(*parent)
        saved = {int(record["iteration"]) for record in history.of("checkpoint")}
        saved |= {iteration_of(path) for path in paths}
        history.checkpoints = sorted(step for step in saved if step <= self._until)
        for start in history.of("start"):
            history.settings = flat_settings(start["config"])
        for path in paths[:1] if not history.settings else ():
            with suppress(OSError, ValueError, KeyError, TypeError):
                run = json.loads((path / RUN).read_bytes())
                history.settings = flat_settings(run["config"])
                history.layout_ranks = math.prod(run["layout"].get(size, 1) for size in WORLD_SIZES)

    def _add_record(self, record: dict[str, Any]) -> None:
        # Our keys in place of the keys of other programs.
        pairs = ((key, name) for key, names in SYNONYMS.items() for name in names if name in record)
        record = {**{key: record[name] for key, name in pairs}, **record}
        if int(record["iteration"]) <= self._until:
            self.history.add(record)

    def _add_event(self, event: dict[str, Any]) -> None:
        if int(event["iteration"]) <= self._until and event["event"]:
            self.history.events.append(event)


def read_run(path: Path, until: int | None = None) -> History:
    """The history of a run, after the history of the run that it continues, if found.

    Args:
        path: Its metrics.jsonl, or the folder with it.
        until: Last iteration to read. None: all.

    Raises:
        UserError: As `read_history`.
    """
    history = read_history(path, until)
    first = int(history["iteration"][0])
    folder = path if path.is_dir() else path.parent
    continued = _continued_run(folder, history) if first > 1 else None
    return history if continued is None else read_run(continued, first - 1).continued_by(history)


def _continued_run(folder: Path, history: History) -> Path | None:
    """The metrics of the run in another folder that one in a --save folder has loaded."""
    loads = [flat_settings(event["config"]).get("--load") for event in history.of("start")]
    for path in list_checkpoints(folder):
        loads.append(json.loads((path / RUN).read_bytes())["config"]["checkpoint"]["load"])
    for load in filter(None, loads):
        for source in (Path(load), Path(load).parent):
            if (source / METRICS).is_file() and not os.path.samefile(source, folder):
                return source / METRICS
    return None


def read_history(path: Path, until: int | None = None) -> History:
    """The history of a run alone.

    Args:
        path: Its metrics.jsonl, or the folder with it.
        until: Last iteration to read. None: all.

    Raises:
        UserError: If no training step has a finite loss, or a line is not a record.
        OSError: If a file cannot be read.
    """
    reader = RunReader(path, until)
    reader.read()
    if not reader.history.points():
        raise user_error("metrics-without-steps", path=reader.metrics)
    return reader.history


def run_problems(field: str, runs: Sequence[str], *, may_start: bool = False) -> Iterator[Problem]:
    """Problems of the runs that an option names. With `may_start` a run may have no metrics yet."""
    for run in runs:
        if not Path(run).exists():
            yield Problem("run-missing", field, path=run)
        elif Path(run).is_dir() and not may_start and not Path(run, METRICS).is_file():
            yield Problem("run-without-metrics", field, path=run)


def names_of(paths: Sequence[str]) -> list[str]:
    """A name per run: its folder's, or its path if two folders have the same name."""
    folders = [Path(path).parent if Path(path).name == METRICS else Path(path) for path in paths]
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(paths)
