"""Tables of runs: their final figures, the settings that differ, their events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from megatron_ds.reports.history import History

LAST_STEPS = 10
"""Steps over which the final loss is averaged."""
MAX_WARNINGS = 20
"""Warnings of a run that a table shows, the last ones."""


class Table(NamedTuple):
    """A table; its first column names the row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Throughput:
    """Speed of a run over its steps that are not warm-up, on the last number of ranks."""

    ranks: int | None
    seconds_per_step: float
    samples_per_second: float
    tokens_per_second: float
    tflops: float
    """Per device."""


def throughput(run: History) -> Throughput | None:
    """The speed of a run; None without a step that is not warm-up."""
    ranks, seconds = run.ranks, run["seconds"]
    timed = (run["warm_up"] == 0) & (seconds > 0)
    if not np.isnan(ranks[-1]):
        timed &= ranks == ranks[-1]
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


def final_loss(run: History) -> float:
    """Mean training loss of the last steps that were not skipped; nan if all were."""
    applied = run["lm_loss"][(run["skipped"] != 1) & ~np.isnan(run["lm_loss"])]
    return float(applied[-LAST_STEPS:].mean()) if len(applied) else float("nan")


def last_losses(run: History, split: str) -> dict[str, float]:
    """The last loss of each dataset of a split by its name."""
    return {group: run.losses(split, group)[-1][1] for group in run.groups(split)}


def figures_table(runs: Mapping[str, History], peak_tflops: float | None = None) -> Table:
    """The final figures of each run."""
    header = ["run", "ranks", "steps", f"loss (last {LAST_STEPS} steps)", "validation loss"]
    header += ["test loss", "s/step", "samples/s", "tokens/s", "TFLOPs per device"]
    header += ["MFU"] if peak_tflops else []
    header += ["peak memory", "skipped", "restarts"]
    rows = []
    for name, run in runs.items():
        speed = throughput(run)
        figures = ["–"] * (4 + bool(peak_tflops))
        ranks = None if speed is None else speed.ranks
        if speed is not None:
            figures = [
                f"{speed.seconds_per_step:.3f}",
                f"{speed.samples_per_second:,.2f}",
                f"{speed.tokens_per_second:,.0f}",
                f"{speed.tflops:,.3g}",
                *([f"{speed.tflops / peak_tflops:.1%}"] if peak_tflops else []),
            ]
        peaks = [each["peak"] for each in run.of("memory") if each.get("peak")]
        rows.append(
            [
                name,
                str(ranks or "–"),
                f"{run['iteration'][-1]:,.0f}",
                f"{final_loss(run):.4f}",
                *(_losses(last_losses(run, split)) for split in ("validation", "test")),
                *figures,
                f"{max(peaks) / 2**30:.2f} GiB" if peaks else "–",
                f"{np.nansum(run['skipped']):.0f}",
                str(len(run.restarts)) if run.events else "–",
            ]
        )
    return Table("Final figures", header, rows)


def _losses(losses: Mapping[str, float]) -> str:
    shown = [f"{group} {loss:.4f}".strip() for group, loss in losses.items()]
    return ", ".join(shown) or "–"


def scaling_table(runs: Mapping[str, History]) -> Table | None:
    """Speed-up and efficiency by number of ranks; None unless these differ."""
    measured = ((name, throughput(run)) for name, run in runs.items())
    known = [(name, each) for name, each in measured if each is not None and each.ranks]
    known.sort(key=lambda pair: pair[1].ranks or 0)
    if len({each.ranks for _, each in known}) < 2:
        return None
    first, rows = known[0][1], []
    for name, each in known:
        speedup = each.tokens_per_second / first.tokens_per_second
        ideal = (each.ranks or 1) / (first.ranks or 1)
        figures = [f"{each.tokens_per_second:,.0f}", f"{speedup:.2f}", f"{speedup / ideal:.0%}"]
        rows.append([name, str(each.ranks), *figures])
    return Table("Scaling", ["run", "ranks", "tokens/s", "speed-up", "of the ideal"], rows)


def settings_table(runs: Mapping[str, History], *, only_different: bool) -> Table:
    """The arguments of the runs, a column for each; a dash where a run has not recorded them."""
    settings = [run.settings for run in runs.values()]
    flags = dict.fromkeys(flag for each in settings for flag in each)
    rows = [[flag, *(_value(each, flag) for each in settings)] for flag in flags]
    if only_different:
        rows = [row for row in rows if len(set(row[1:])) > 1]
    title = "Settings that differ" if only_different else "All settings"
    return Table(title, ["argument", *runs], rows)


def _value(settings: Mapping[str, object], flag: str) -> str:
    if flag not in settings:
        return "–"
    value = settings[flag]
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def events_table(runs: Mapping[str, History]) -> Table:
    """Starts, ends, the newest checkpoint and the last warnings."""
    rows = []
    for name, run in runs.items():
        warnings = run.of("warning")[-MAX_WARNINGS:]
        newest = run.of("checkpoint")[-1:]
        shown = (*run.of("start"), *run.of("end"), *newest, *warnings)
        for each in sorted(shown, key=lambda event: event.get("time", 0)):
            rows.append([name, *event_cells(each)])
    return Table("Events", ["run", "time (UTC)", "iteration", "event"], rows)


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
