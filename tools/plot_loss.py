"""Plot the loss curve of a run as a PNG and as text.

Reads the metrics.jsonl that a run writes next to its checkpoints.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem, user_error

Points = list[tuple[int, float]]
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


@dataclass(frozen=True)
class Curves:
    """(iteration, loss) of the training steps and of the evaluations, in nats per token."""

    train: Points
    validation: Points
    test: Points


def read_curves(path: Path) -> Curves:
    """The curves of a run, without losses that are not finite.

    Raises:
        UserError: If there is no training step, or a line is no record.
    """
    curves = Curves([], [], [])
    keys = {"lm_loss": curves.train, "validation_loss": curves.validation, "test_loss": curves.test}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                for key, points in keys.items():
                    if record.get(key) is not None:
                        points.append((int(record["iteration"]), float(record[key])))
            except (ValueError, TypeError, KeyError, AttributeError):
                raise user_error("metrics-line-invalid", path=path, line=number) from None
    if not curves.train:
        raise user_error("metrics-without-steps", path=path)
    return curves


def chart(
    curves: Curves, baseline: float | None, name: str, width: int = 64, height: int = 16
) -> str:
    """The curves as text: `.` training (mean of a column), `o` validation, `-` baseline."""
    first = curves.train[0][0]
    last = max(iteration for iteration, _ in [*curves.train, *curves.validation])

    def column(iteration: int) -> int:
        return round((iteration - first) / (last - first or 1) * (width - 1))

    binned: dict[int, list[float]] = {}
    for iteration, loss in curves.train:
        binned.setdefault(column(iteration), []).append(loss)
    means = {place: sum(values) / len(values) for place, values in binned.items()}
    losses = [*means.values(), *(loss for _, loss in curves.validation)]
    losses += [] if baseline is None else [baseline]
    low, high = min(losses), max(losses)

    def row(loss: float) -> int:
        return round((high - loss) / (high - low or 1.0) * (height - 1))

    grid = [[" "] * width for _ in range(height)]
    if baseline is not None:
        grid[row(baseline)] = ["-"] * width
    for place, loss in means.items():
        grid[row(loss)][place] = "."
    for iteration, loss in curves.validation:
        grid[row(loss)][column(iteration)] = "o"

    legend = ". training   o validation" + ("" if baseline is None else f"   - {name}")
    step = (high - low) / (height - 1)
    lines = [f"{high - step * i:7.2f} |{''.join(cells)}" for i, cells in enumerate(grid)]
    axis = f"{'':7} +{'-' * width}\n{'':9}{first:<{width // 2}}{last:>{width // 2}}"
    return "\n".join([f"   loss   {legend}", *lines, axis, f"{'iteration':^{width + 9}}"])


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
