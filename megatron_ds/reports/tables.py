"""Tables of runs: their status, final figures, the settings that differ, their events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megatron_ds.config import ModelConfig, MoEConfig, PrecisionConfig
from megatron_ds.reports.history import History, flat_settings
from megatron_ds.training.records import metric_title

LAST_STEPS = 10
"""Steps over which the final loss is averaged."""
MAX_WARNINGS = 20
"""Warnings of a run that a table shows, the last ones."""
RECENT = 50
"""Last steps over which speed and loss are averaged."""
LATE_INTERVALS = 3
"""A run is late if nothing was written for this number of log intervals, and `LATE_SECONDS`."""
LATE_SECONDS = 10.0
"""Seconds without a write after which a run may be late."""
UNKNOWN = "–"
MODEL = (item.name for group in (ModelConfig, MoEConfig, PrecisionConfig) for item in fields(group))
COMPARED = tuple(flat_settings({"": dict.fromkeys(MODEL)}))
"""Settings that are equal in runs whose speeds can be compared."""


class Table(NamedTuple):
    """A table; its first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Throughput:
    """Speed of a run over its steps that are not warm-up, in its last layout."""

    ranks: int | None
    seconds_per_step: float
    samples_per_second: float
    tokens_per_second: float
    tflops: float
    """TFLOP/s per device."""


def throughput(run: History) -> Throughput | None:
    """The speed of a run; None without a step that is not warm-up."""
    ranks = run.ranks
    seconds = run["seconds"]
    begin = 0
    for before, start in pairwise(run.of("start")):
        if _layout(before) != _layout(start):
            begin = start["iteration"]
    timed = (run["warm_up"] == 0) & (seconds > 0) & (run["iteration"] > begin)
    total = seconds[timed].sum()
    if not total:
        return None
    tokens, operations = (
        (run[key] * seconds)[timed].sum() for key in ("tokens_per_second", "tflops")
    )
    return Throughput(
        ranks=None if np.isnan(ranks[-1]) else int(ranks[-1]),
        seconds_per_step=total / timed.sum(),
        samples_per_second=run["global_batch_size"][timed].sum() / total,
        tokens_per_second=tokens / total,
        tflops=operations / total,
    )


def _layout(start: Mapping[str, Any]) -> tuple[Any, ...]:
    """Ranks of a start, with its parallel and DeepSpeed options."""
    return start.get("ranks"), *(start["config"].get(group) for group in ("parallel", "deepspeed"))


def comparable(runs: Mapping[str, History]) -> list[list[tuple[str, Throughput]]]:
    """Names and speeds of runs of the same model, precision and batch, by number of ranks.

    Only groups whose numbers of ranks differ.
    """
    groups = dict[tuple[Any, ...], list[tuple[str, Throughput]]]()
    for name, run in runs.items():
        speed = throughput(run)
        if speed is not None and speed.ranks:
            same = (str(run.settings.get(flag)) for flag in COMPARED)
            groups.setdefault((run["global_batch_size"][-1], *same), []).append((name, speed))
    ordered = [sorted(rows, key=lambda pair: pair[1].ranks or 0) for rows in groups.values()]
    return [rows for rows in ordered if rows[0][1].ranks != rows[-1][1].ranks]


def final_loss(run: History) -> float:
    """Mean training loss of the last steps that were not skipped; nan if all were."""
    applied = run["lm_loss"][(run["skipped"] != 1) & ~np.isnan(run["lm_loss"])]
    return float(applied[-LAST_STEPS:].mean()) if len(applied) else float("nan")


def last_losses(run: History, split: str) -> dict[str, float]:
    """The last loss of each dataset of a split by its name."""
    return {group: run.losses(split, group)[-1][1] for group in run.groups(split)}


def last_extras(run: History, name: str) -> dict[str, float]:
    """The last value of a further metric of each validation dataset that has it, by its name."""
    return {
        item.group: item.extras[name]
        for item in run.evaluations
        if item.split == "validation" and name in item.extras
    }


def figures_table(runs: Mapping[str, History], peak_tflops: float | None = None) -> Table:
    """The final figures of each run."""
    rows = []
    has_forks = any(run.parent for run in runs.values())
    extras = {"bits_per_byte": None}  # a column also without values
    for item in (item for run in runs.values() for item in run.evaluations):
        extras |= dict.fromkeys(item.extras)
    for name, run in runs.items():
        speed = throughput(run)
        total = run.total_iterations
        speeds = dict.fromkeys(("s/step", "samples/s", "tokens/s", "TFLOPs per device"), UNKNOWN)
        speeds |= {"MFU": UNKNOWN} if peak_tflops else {}
        if speed is not None:
            speeds["s/step"] = f"{speed.seconds_per_step:.3f}"
            speeds["samples/s"] = f"{speed.samples_per_second:,.2f}"
            speeds["tokens/s"] = f"{speed.tokens_per_second:,.0f}"
            speeds["TFLOPs per device"] = f"{speed.tflops:,.3g}"
            speeds |= {"MFU": f"{speed.tflops / peak_tflops:.1%}"} if peak_tflops else {}
        peaks = [record["peak"] for record in run.of("memory") if record.get("peak")]
        row = {
            "run": name,
            **({"fork of": run.parent or UNKNOWN} if has_forks else {}),
            "status": _status(run),
            "ranks": _ranks(run),
            "steps": f"{run['iteration'][-1]:,.0f}" + (f" of {total:,}" if total else ""),
            f"loss (last {LAST_STEPS} steps)": f"{final_loss(run):.4f}",
            "validation loss": _losses(last_losses(run, "validation")),
            **{metric_title(name): _losses(last_extras(run, name)) for name in extras},
            "test loss": _losses(last_losses(run, "test")),
            **speeds,
            "peak memory": f"{max(peaks) / 2**30:.2f} GiB" if peaks else UNKNOWN,
            "skipped": f"{np.nansum(run['skipped']):.0f}",
            "restarts": str(len(run.restarts)) if run.events else UNKNOWN,
        }
        rows.append(row)
    return Table("Final figures", list(rows[0]), [list(row.values()) for row in rows])


def _status(run: History) -> str:
    """Whether the run ended, runs, or ended without a record of it."""
    age = time.time() - run.written
    now = status(run, age)
    if now.has_ended or not now.is_late:
        return now.text
    return f"no end recorded, last step {duration(age)} ago" if run.of("start") else UNKNOWN


def _ranks(run: History) -> str:
    """The numbers of ranks, in their order."""
    numbers = [start.get("ranks") for start in run.of("start")] or [run.layout_ranks]
    changes = [count for before, count in pairwise([None, *numbers]) if count != before]
    return ", then ".join(str(count or UNKNOWN) for count in changes) or UNKNOWN


def about_table(runs: Mapping[str, History]) -> Table:
    """Description of each run, from its banner; without rows if no run has recorded it."""
    lines = [run.of("about")[-1]["lines"] if run.of("about") else {} for run in runs.values()]
    labels = dict.fromkeys(label for line in lines for label in line)
    rows = [[label, *(line.get(label, UNKNOWN) for line in lines)] for label in labels]
    return Table("About", ["", *runs], rows)


def _losses(losses: Mapping[str, float]) -> str:
    shown = [f"{group} {loss:.4f}".strip() for group, loss in losses.items()]
    return ", ".join(shown) or UNKNOWN


def scaling_table(runs: Mapping[str, History]) -> Table | None:
    """Speed-up and efficiency by number of ranks; None without runs that can be compared."""
    rows = []
    for group in comparable(runs):
        first = group[0][1]
        for name, item in group:
            speedup = item.tokens_per_second / first.tokens_per_second
            ideal = (item.ranks or 1) / (first.ranks or 1)
            figures = [f"{item.tokens_per_second:,.0f}", f"{speedup:.2f}", f"{speedup / ideal:.0%}"]
            rows.append([name, str(item.ranks), *figures])
    header = ["run", "ranks", "tokens/s", "speed-up", "of the ideal"]
    return Table("Scaling", header, rows) if rows else None


def settings_table(runs: Mapping[str, History], *, only_different: bool) -> Table:
    """The arguments of the runs, a column for each; a dash where a run has not recorded them."""
    settings = [run.settings for run in runs.values()]
    flags = dict.fromkeys(flag for values in settings for flag in values)
    rows = [[flag, *(_value(values, flag) for values in settings)] for flag in flags]
    if only_different:
        rows = [row for row in rows if len({*row[1:]} - {UNKNOWN}) > 1]
    title = "Settings that differ" if only_different else "All settings"
    return Table(title, ["argument", *runs], rows)


def _value(settings: Mapping[str, object], flag: str) -> str:
    if flag not in settings:
        return UNKNOWN
    value = settings[flag]
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def events_table(runs: Mapping[str, History]) -> Table:
    """Starts, stages, ends, the newest checkpoint and the last warnings."""
    rows = []
    for name, run in runs.items():
        warnings = run.of("warning")[-MAX_WARNINGS:]
        newest = run.of("checkpoint")[-1:]
        changes = (record for name in ("start", "stage", "end") for record in run.of(name))
        shown = (*changes, *newest, *warnings)
        for record in sorted(shown, key=lambda event: event.get("time", 0)):
            rows.append([name, *event_cells(record)])
    return Table("Events", ["run", "time (UTC)", "iteration", "event"], rows)


@dataclass(frozen=True)
class Status:
    """Present activity of a run."""

    text: str
    has_ended: bool = False
    is_late: bool = False


def status(run: History, age: float) -> Status:
    """The status of a run.

    Args:
        run: Its history.
        age: Seconds since it has written.
    """
    changes = [record for record in run.events if record["event"] in ("start", "end")]
    if changes and changes[-1]["event"] == "end":
        return Status([*event_cells(changes[-1])][-1], has_ended=True)
    if not len(run):
        return Status("no step yet")
    if not changes and run["iteration"][-1] == run.total_iterations:
        return Status("ended", has_ended=True)
    interval = seconds_per_step(run) * int(run.settings.get("--log-interval") or 1)
    if interval and age > max(LATE_INTERVALS * interval, LATE_SECONDS):
        times = f"{age / interval:,.0f} times that of a log interval"
        return Status(f"no new step for {duration(age)}, {times}", is_late=True)
    return Status("running")


def seconds_per_step(run: History) -> float:
    """Median of the last steps that are not warm-up; 0 if there are none."""
    timed = run["seconds"][-RECENT:][run["warm_up"][-RECENT:] != 1]
    return float(np.median(timed)) if len(timed) else 0.0


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def event_cells(event: Mapping[str, object]) -> Iterator[str]:
    """Time, iteration and description of an event."""
    when = datetime.fromtimestamp(float(str(event.get("time", 0))), UTC)
    yield f"{when:%Y-%m-%d %H:%M:%S}"
    yield str(event["iteration"])
    if event["event"] == "start":
        yield f"{'resumed' if event['iteration'] else 'started'} on {event.get('ranks')} ranks"
    elif event["event"] == "end":
        error = event.get("error")
        yield f"ended with status {event.get('status')}" if error is None else f"failed: {error}"
    elif event["event"] == "checkpoint":
        yield "saved its newest checkpoint"
    else:
        yield f"{event['event']}: {event.get('text', '')}"
