"""Plot the loss curve of a run as a PNG and as text.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.training.loss_curves import Curves, Points, chart, read_curves

SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Options:
    """Plots the loss curve of a run as text, and as a figure with --output."""

    metrics: str = option_field("", "metrics.jsonl of the run", metavar="FILE", required=True)
    output: str | None = option_field(None, f"output file ({' '.join(SUFFIXES)})", metavar="FILE")
    baseline: float | None = option_field(None, "loss to show as a horizontal line")
    baseline_name: str = option_field("unigram model", "name of the horizontal line")

    def problems(self) -> Iterator[Problem]:
        if os.path.isdir(self.metrics):
            yield Problem("not-a-file", "metrics", path=self.metrics)
        if self.output is None:
            return
        if not self.output.lower().endswith(SUFFIXES):
            yield Problem("plot-suffix", output=self.output, suffixes=" ".join(SUFFIXES))
        elif importlib.util.find_spec("matplotlib") is None:
            yield Problem("plot-needs-matplotlib", output=self.output)


def draw(curves: Curves, path: Path, baseline: float | None, name: str) -> None:
    """Write the PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*split(curves.train), color="tab:blue", alpha=0.7, linewidth=1, label="training")
    axes.plot(*split(curves.validation), "o-", color="tab:orange", label="validation")
    axes.plot(*split(curves.test), "*", color="tab:red", markersize=10, label="test")
    if baseline is not None:
        axes.axhline(baseline, color="grey", linestyle="--", label=f"{name}: {baseline:.2f}")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def split(points: Points) -> tuple[Sequence[int], Sequence[float]]:
    """Iterations and losses."""
    return [iteration for iteration, _ in points], [loss for _, loss in points]


def work(options: Options) -> None:
    curves = read_curves(Path(options.metrics))
    print(chart(curves, options.baseline, options.baseline_name))
    if options.output is not None:
        draw(curves, Path(options.output), options.baseline, options.baseline_name)
        print(f"wrote {options.output}")


def main(argv: Sequence[str]) -> int:
    return cli.run(Options, work, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
