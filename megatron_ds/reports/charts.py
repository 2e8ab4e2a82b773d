"""Contents of charts: series of numbers from the histories of runs. Draws nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np

from megatron_ds.reports.history import AXES, History, Values
from megatron_ds.reports.tables import comparable
from megatron_ds.training.records import StepRecord

Runs = Mapping[str, History]
"""Histories by the name of the run."""
SMOOTHED_PARTS = 20
"""The default smoothing averages over less than the run divided by this."""
MAX_POINTS = 400
"""Points of a line in a page; a line of more shows the extremes of equal parts."""
AXIS_LABELS = dict(zip(AXES, AXES, strict=True)) | {
    "flops": "FLOPs",
    "time": "time of the training steps",
}
RECORDED = frozenset(item.name for item in dataclasses.fields(StepRecord))
"""Keys of the columns that every run has; others are metrics, such as the losses of experts."""


@dataclass(frozen=True)
class Line:
    """A line or a set of points.

    Attributes:
        color: Number of the run.
        kind: "line", "faint" (behind a smoothed line), "dots", "stars" or "ideal" (dashed, grey).
    """

    label: str
    color: int
    x: Values
    y: Values
    kind: str = "line"


@dataclass(frozen=True)
class Mark:
    """Points of a run on the horizontal axis: a "restart", "stage", "checkpoint" or
    "warning"."""

    kind: str
    color: int
    x: Values


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: Name of its file.
        unit: Unit of the horizontal axis: "" for a number, "s" for seconds.
        is_logarithmic: Whether both axes are logarithmic.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    marks: tuple[Mark, ...] = ()
    unit: str = ""
    baselines: Mapping[str, float] = field(default_factory=dict)
    is_logarithmic: bool = False

    def description(self) -> str:
        """The chart in a few words, for those who cannot see it."""
        parts = [
            f"{line.label or 'the run'} from {line.y[0]:.4g} to {line.y[-1]:.4g}, "
            f"between {line.y.min():.4g} and {line.y.max():.4g}"
            for line in self.lines
            if line.kind != "faint" and len(line.y)
        ]
        return f"{self.title} against {self.x_label}: {'; '.join(parts)}"

    @property
    def is_constant(self) -> bool:
        return all(len(line.y) > 1 and line.y.min() == line.y.max() for line in self.lines)

    def constants(self) -> list[str]:
        """The values of a constant chart, each once."""
        values = (f"{line.label} {line.y[0]:,.4g}".strip() for line in self.lines)
        return list(dict.fromkeys(values))


def smooth(values: Sequence[float] | Values, weight: float) -> list[float]:
    """Means with weights that fall exponentially to both sides, so that the curve does not lag."""

    def sums(series: Values) -> Values:
        return np.array([*accumulate(series, lambda total, value: weight * total + value)])

    y = np.asarray(values, dtype=float)
    total, count = (sums(data) + sums(data[::-1])[::-1] - data for data in (y, np.ones_like(y)))
    means: list[float] = (total / count).tolist()
    return means


def thinned(line: Line, limit: int = MAX_POINTS) -> Line:
    """The line with at most about `limit` points: of each of equal parts the extremes."""
    count = len(line.x)
    if count <= limit or line.kind in ("dots", "stars"):
        return line
    edges = np.linspace(0, count, limit // 2 + 1).astype(int)
    kept = {0, count - 1}
    for first, end in pairwise(edges):
        part = line.y[first:end]
        kept |= {int(first + part.argmin()), int(first + part.argmax())}
    places = sorted(kept)
    return replace(line, x=line.x[places], y=line.y[places])


def curve(
    label: str, color: int, x: Values, y: Values, smoothing: float | None = 0.0
) -> list[Line]:
    """The known values as a line, over their faint raw values if it is smoothed.

    Args:
        label: Name in the legend.
        color: Number of the run.
        x: Positions.
        y: Values.
        smoothing: Weight of `smooth`; None: 0.9, less for short runs.
    """
    known = ~(np.isnan(x) | np.isnan(y))
    x = x[known]
    y = y[known]
    if not len(x):
        return []
    if smoothing is None:
        smoothing = max(0.0, min(0.9, 1 - SMOOTHED_PARTS / len(y)))
    if not smoothing:
        return [Line(label, color, x, y)]
    means = np.array(smooth(y, smoothing))
    return [Line("", color, x, y, "faint"), Line(label, color, x, means)]


def loss_chart(runs: Runs, axis: str, smoothing: float | None = None) -> Chart:
    """Training, validation and test losses against an axis of AXES, with marks of events.

    Args:
        runs: Their histories.
        axis: Horizontal axis.
        smoothing: See `curve`.
    """
    lines: list[Line] = []
    marks: list[Mark] = []
    for color, (name, run) in enumerate(runs.items()):
        label = name if len(runs) > 1 else "training"
        lines += curve(label, color, run.axis(axis), run["lm_loss"], smoothing)
        for split, style in (("validation", "dots"), ("test", "stars")):
            points = run.losses(split)
            x = run.place(axis, [iteration for iteration, _ in points])
            y = np.array([loss for _, loss in points])
            label = "" if any(line.label == split for line in lines) else split
            lines += [replace(line, kind=style) for line in curve(label, color, x, y)]
        marks += _marks(run, axis, color)
    label = AXIS_LABELS[axis]
    unit = "s" if axis == "time" else ""
    y_label = "loss (nats per token)"
    name = f"loss-{axis.lower()}"
    return Chart(name, "Loss", label, y_label, tuple(lines), tuple(marks), unit)


def _marks(run: History, axis: str, color: int) -> Iterator[Mark]:
    """Restarts, stages, checkpoints and warnings within the steps of a run."""
    first, last = run["iteration"][[0, -1]]
    events = {
        "restart": [item["iteration"] for item in run.of("start") if item["iteration"] > 0],
        "stage": [item["iteration"] for item in run.of("stage")],
        "checkpoint": run.checkpoints,
        "warning": [item["iteration"] for item in run.of("warning")],
    }
    for event, iterations in events.items():
        within = sorted({step for step in iterations if first - 1 <= step <= last})
        if within:
            yield Mark(event, color, run.place(axis, within))


def step_chart(
    runs: Runs, key: str, title: str, y_label: str, values: Mapping[str, Values], smoothing: float
) -> Chart:
    """A metric of the steps against the iteration.

    Args:
        runs: Their histories.
        key: Name of the chart.
        title: Title of the chart.
        y_label: Label of the vertical axis.
        values: Values of each run, one per step.
        smoothing: See `curve`.
    """
    lines: list[Line] = []
    for color, (name, run) in enumerate(runs.items()):
        label = name if len(runs) > 1 else ""
        lines += curve(label, color, run["iteration"], values[name], smoothing)
    return Chart(key, title, "iteration", y_label, tuple(lines))


def validation_chart(runs: Runs) -> Chart:
    """The validation loss of every dataset."""
    lines: list[Line] = []
    for color, (name, run) in enumerate(runs.items()):
        for index, group in enumerate(run.groups("validation")):
            points = np.array(run.losses("validation", group)).T
            label = ": ".join(filter(None, [name if len(runs) > 1 else "", group]))
            lines += curve(label, color + index * len(runs), points[0], points[1])
    title = "Validation loss"
    return Chart("validation", title, "iteration", "loss (nats per token)", tuple(lines))


def memory_chart(runs: Runs) -> Chart:
    """The peak memory of the first rank, where it was recorded."""
    lines: list[Line] = []
    for color, (name, run) in enumerate(runs.items()):
        known = [record for record in run.of("memory") if record.get("peak")]
        x, peaks = (np.array([record[key] for record in known]) for key in ("iteration", "peak"))
        label = name if len(runs) > 1 else ""
        lines += curve(label, color, x, peaks / 2**30) if known else []
    title = "Peak memory of rank 0"
    return Chart("memory", title, "iteration", "GiB", tuple(lines))


def scaling_chart(runs: Runs) -> Chart | None:
    """Throughput against ranks with the ideal line; None without runs that can be compared."""
    lines: list[Line] = []
    groups = comparable(runs)
    for color, group in enumerate(groups):
        label = "measured" if len(groups) == 1 else ", ".join(name for name, _ in group)
        points = [(result.ranks, result.tokens_per_second) for _, result in group]
        x, y = np.array(points, dtype=float).T
        lines.append(Line("" if color else "ideal", color, x, y[0] / x[0] * x, "ideal"))
        if len({*x}) == len(x):
            lines.append(Line(label, color, x, y))
            label = ""
        lines.append(Line(label, color, x, y, "dots"))
    title = "Throughput by number of ranks"
    return Chart("scaling", title, "ranks", "tokens/s", tuple(lines)) if lines else None


def step_charts(runs: Runs, peak_tflops: float | None) -> Iterator[Chart]:
    """The charts of metrics of the steps that any of the runs has."""

    def columns(key: str, *, timed: bool = False) -> dict[str, Values]:
        return {
            name: np.where(run["warm_up"] == 1, np.nan, run[key]) if timed else run[key]
            for name, run in runs.items()
        }

    def chart(key: str, title: str, y_label: str, smoothing: float = 0.0) -> Chart:
        timed = key in ("tokens_per_second", "tflops")
        return step_chart(runs, key, title, y_label, columns(key, timed=timed), smoothing)

    yield chart("learning_rate", "Learning rate", "learning rate")
    yield chart("global_batch_size", "Batch size", "samples per step")
    yield chart("grad_norm", "Gradient norm", "norm before clipping", 0.9)
    yield chart("loss_scale", "Loss scale", "loss scale")
    skipped = {name: values.cumsum() for name, values in columns("skipped").items()}
    yield step_chart(runs, "skipped", "Skipped steps", "steps so far", skipped, 0)
    yield chart("tokens_per_second", "Throughput", "tokens/s", 0.9)
    yield chart("tflops", "Model TFLOPs per device", "TFLOPs", 0.9)
    if peak_tflops is not None:
        tflops = columns("tflops", timed=True)
        mfu = {name: 100 * values / peak_tflops for name, values in tflops.items()}
        title = f"MFU (of {peak_tflops:g} TFLOPs)"
        yield step_chart(runs, "mfu", title, "%", mfu, 0.9)
    yield memory_chart(runs)
    extras = dict.fromkeys(key for run in runs.values() for key in run.columns)
    for key in extras:
        if key not in RECORDED and "/" not in key:  # not one of a series, as of each expert
            yield chart(key, key.replace("_", " "), key.replace("_", " "), 0.9)


def charts_of(runs: Runs, peak_tflops: float | None = None) -> Iterator[Chart]:
    """All charts that have anything to show, the loss first.

    Args:
        runs: Their histories.
        peak_tflops: Peak of a device in 10^12 operations per second, for the MFU.
    """
    scaling = scaling_chart(runs)
    losses = (loss_chart(runs, axis) for axis in AXES)
    charts = (*losses, validation_chart(runs), *step_charts(runs, peak_tflops))
    for chart in (*charts, *(() if scaling is None else (scaling,))):
        if chart.lines:
            yield replace(chart, lines=tuple(map(thinned, chart.lines)))
