"""Loss curves of a run: read from its metrics.jsonl, shown as text. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ds.checkpoint.metadata import RUN, list_checkpoints
from megatron_ds.config.problems import user_error

METRICS = "metrics.jsonl"
"""File of a --save folder."""
Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Curves:
    """(iteration, loss) of the training steps and of the evaluations, in nats per token."""

    train: Points
    validation: Points
    test: Points
    tokens: dict[int, int] = field(default_factory=dict)
    """Consumed tokens by iteration."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Duration of the steps so far by iteration."""

    @property
    def last_iteration(self) -> int:
        return self.train[-1][0]

    def x(self, axis: str, iteration: int) -> float:
        """The place of an iteration on the axis `iteration`, `tokens` or `time` (in seconds)."""
        if axis == "iteration":
            return iteration
        return (self.tokens if axis == "tokens" else self.seconds).get(iteration, 0)

    def followed_by(self, other: Curves) -> Curves:
        """The curves with those of a run that continues this one."""
        offset = max(self.seconds.values(), default=0.0)
        return Curves(
            self.train + other.train,
            self.validation + other.validation,
            self.test + other.test,
            self.tokens | other.tokens,
            self.seconds | {key: offset + value for key, value in other.seconds.items()},
        )


def read_run(path: Path, until: int | None = None) -> Curves:
    """The curves of a run, after those of the run that it continues, as far as they are found.

    Args:
        path: Its metrics.jsonl, or the folder with it.
        until: Last iteration to read. None: all.

    Raises:
        UserError: As `read_curves`.
    """
    path = path / METRICS if path.is_dir() else path
    curves = read_curves(path, until)
    first = curves.train[0][0]
    continued = _continued_run(path.parent) if first > 1 else None
    return curves if continued is None else read_run(continued, first - 1).followed_by(curves)


def _continued_run(folder: Path) -> Path | None:
    """The metrics of the run in another folder that one in a --save folder has loaded."""
    for path in list_checkpoints(folder):
        load = json.loads((path / RUN).read_text(encoding="utf-8"))["config"]["checkpoint"]["load"]
        for place in () if load is None else (Path(load), Path(load).parent):
            if (place / METRICS).is_file() and not os.path.samefile(place, folder):
                return place / METRICS
    return None


def smooth(losses: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average; the first values are averages of few, not biased to the first."""
    total, count, means = 0.0, 0.0, []
    for loss in losses:
        total, count = weight * total + loss, weight * count + 1
        means.append(total / count)
    return means


def read_curves(path: Path, until: int | None = None) -> Curves:
    """The curves of a run, without losses that are not finite.

    Args:
        path: Its metrics.jsonl.
        until: Last iteration to read. None: all.

    Raises:
        UserError: If there is no training step, or a line is no record.
    """
    curves, seconds = Curves([], [], []), 0.0
    keys = {"lm_loss": curves.train, "validation_loss": curves.validation, "test_loss": curves.test}
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                if until is not None and int(record["iteration"]) > until:
                    continue
                if "seconds" in record:
                    seconds += record["seconds"]
                    curves.seconds[record["iteration"]] = seconds
                    curves.tokens[record["iteration"]] = record["consumed_tokens"]
                for key, points in keys.items():
                    if record.get(key) is not None:
                        points.append((int(record["iteration"]), float(record[key])))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
