"""Plot the loss curves of runs.

Reads the metrics.jsonl that a run writes next to its checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.checks import drawing_problems, output_problems
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.reports.charts import loss_chart
from megatron_ds.reports.history import AXES, names_of, read_run, run_problems, runs_field

SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Options:
    """Plots the loss curves of runs; tools/watch.py --once shows one in a terminal."""

    PROGRAM: ClassVar[str] = "plot_loss.py"

    runs: tuple[str, ...] = runs_field(aliases=("metrics",))
    output: str = option_field(
        "loss.png", help=f"output file ({' '.join(SUFFIXES)})", metavar="FILE"
    )
    x: str = option_field("iteration", choices=AXES)
    """Horizontal axis; time is that of the training steps."""
    smoothing: float | None = option_field(None, minimum=0, below=1)
    """Weight of the steps around each one in the smoothed curve; 0: none (default: 0.9, less for
    short runs)."""
    title: str | None = option_field(None)
    """Title (default: the names of the runs)."""
    baseline: float | None = option_field(None)
    """Loss to show as a horizontal line."""
    baseline_name: str = option_field("baseline")
    """Name of the horizontal line."""

    def problems(self) -> Iterator[Problem]:
        yield from run_problems("runs", self.runs)
        yield from output_problems("output", self.output)
        yield from drawing_problems("output", self.output, SUFFIXES)


def work(options: Options) -> None:
    paths = list(dict.fromkeys(options.runs))
    runs = dict(zip(names_of(paths), map(read_run, map(Path, paths)), strict=True))
    from megatron_ds.reports import figures  # matplotlib takes half a second to import

    shown = loss_chart(runs, options.x, options.smoothing)
    title = options.title or ", ".join(runs)
    baselines = {}
    if options.baseline is not None:
        baselines[f"{options.baseline_name}: {options.baseline:.2f}"] = options.baseline
    figures.save(replace(shown, title=title, baselines=baselines), Path(options.output))
    print(f"wrote {options.output}")


main = cli.program(Options, work)
