"""Plot the loss curves of runs as a figure and as text.

Reads the metrics.jsonl that a run writes next to its checkpoints.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath(f"{__file__}/../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.training.loss_curves import METRICS, Curves, Points, chart, read_run, smooth

SUFFIXES = (".png", ".pdf", ".svg")
SMOOTHED_PARTS = 20
"""The default smoothing averages over less than the run divided by this."""


@dataclass(frozen=True)
class Options:
    """Plots the loss curves of runs as text, and as a figure with --output."""

    metrics: tuple[str, ...] = option_field(
        (),
        "--save folder or metrics.jsonl of each run; a run that continues another one begins with "
        "its curve",
        nargs="*",
        metavar="PATH",
        required=True,
    )
    output: str | None = option_field(None, f"output file ({' '.join(SUFFIXES)})", metavar="FILE")
    x: str = option_field(
        "iteration",
        "horizontal axis; time is that of the training steps",
        choices=("iteration", "tokens", "time"),
    )
    smoothing: float | None = option_field(
        None,
        "weight of the past in the smoothed curve; 0: none (default: 0.9, less for short runs)",
        minimum=0,
        below=1,
    )
    title: str | None = option_field(None, "title (default: the names of the runs)")
    baseline: float | None = option_field(None, "loss to show as a horizontal line")
    baseline_name: str = option_field("baseline", "name of the horizontal line")

    def problems(self) -> Iterator[Problem]:
        if self.output is None:
            return
        if not self.output.lower().endswith(SUFFIXES):
            yield Problem("plot-suffix", output=self.output, suffixes=" ".join(SUFFIXES))
        elif importlib.util.find_spec("matplotlib") is None:
            yield Problem("plot-needs-matplotlib", output=self.output)


def draw(runs: Mapping[str, Curves], options: Options, path: Path) -> None:
    """Writes the figure."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter
    from matplotlib.transforms import offset_copy

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    # A test follows the last validation, and its point would cover it.
    beside = offset_copy(axes.transData, figure, x=9, units="points")
    longest = max(curves.x("time", curves.last_iteration) for curves in runs.values())
    in_hours = options.x == "time" and longest > 2 * 3600
    scale = {"time": 3600.0 if in_hours else 60.0}.get(options.x, 1.0)

    def split(curves: Curves, points: Points) -> tuple[Sequence[float], Sequence[float]]:
        """Positions on the horizontal axis, and losses."""
        places = [curves.x(options.x, iteration) / scale for iteration, _ in points]
        return places, [loss for _, loss in points]

    for number, (name, curves) in enumerate(runs.items()):
        prefix = f"{name}: " if len(runs) > 1 else ""
        color, marked = f"C{number}", f"C{number if len(runs) > 1 else 1}"
        places, losses = split(curves, curves.train)
        weight = options.smoothing
        if weight is None:
            weight = max(0.0, min(0.9, 1 - SMOOTHED_PARTS / len(losses)))
        if weight:
            axes.plot(places, losses, color=color, alpha=0.25, linewidth=0.8)
        smoothed, label = smooth(losses, weight), f"{prefix}training"
        axes.plot(places, smoothed, color=color, linewidth=1.6, label=label)
        for kind, points, marker, size, transform in (
            ("validation", curves.validation, "o", 7, axes.transData),
            ("test", curves.test, "*", 14, beside),
        ):
            if points:
                (marks,) = axes.plot(*split(curves, points), marker, transform=transform)
                marks.set(color=marked, markersize=size, markeredgecolor="white", zorder=3)
                marks.set(label=f"{prefix}{kind}", clip_on=False)
    if options.baseline is not None:
        label = f"{options.baseline_name}: {options.baseline:.2f}"
        axes.axhline(options.baseline, color="grey", linestyle="--", label=label)
    if options.x == "tokens":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    time = f"training steps ({'hours' if in_hours else 'minutes'})"
    axes.set_xlabel(time if options.x == "time" else options.x)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(options.title or ", ".join(runs))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)


def names_of(paths: Sequence[str]) -> list[str]:
    """A name per run: its folder's, or its path if two folders have the same name."""
    folders = [Path(path).parent if Path(path).name == METRICS else Path(path) for path in paths]
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(paths)


def work(options: Options) -> None:
    paths = list(dict.fromkeys(options.metrics))
    runs = dict(zip(names_of(paths), map(read_run, map(Path, paths)), strict=True))
    for name, curves in runs.items():
        print(f"{name}\n" if len(runs) > 1 else "", end="")
        print(chart(curves, options.baseline, options.baseline_name))
    if options.output is not None:
        draw(runs, options, Path(options.output))
        print(f"wrote {options.output}")


main = cli.program(Options, work)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
