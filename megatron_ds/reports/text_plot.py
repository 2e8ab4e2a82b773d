"""Curves of a run as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_ds.reports.history import History

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character's dots, by column and row from the top."""


def chart(
    run: History, baseline: float | None, name: str, width: int = 64, height: int = 16
) -> str:
    """The curves as text: `.` training (mean of a column), `o` validation, `-` baseline."""
    train, validation = run.points(), run.losses("validation")
    first = train[0][0]
    last = max(iteration for iteration, _ in [*train, *validation])

    def column(iteration: int) -> int:
        return round((iteration - first) / (last - first or 1) * (width - 1))

    binned: dict[int, list[float]] = {}
    for iteration, loss in train:
        binned.setdefault(column(iteration), []).append(loss)
    means = {place: sum(values) / len(values) for place, values in binned.items()}
    losses = [*means.values(), *(loss for _, loss in validation)]
    losses += [] if baseline is None else [baseline]
    low, high = min(losses), max(losses)

    def row(loss: float) -> int:
        return round((high - loss) / (high - low or 1.0) * (height - 1))

    grid = [[" "] * width for _ in range(height)]
    if baseline is not None:
        grid[row(baseline)] = ["-"] * width
    for place, loss in means.items():
        grid[row(loss)][place] = "."
    for iteration, loss in validation:
        grid[row(loss)][column(iteration)] = "o"

    legend = ". training   o validation" + ("" if baseline is None else f"   - {name}")
    step = (high - low) / (height - 1)
    lines = [f"{high - step * i:7.2f} |{''.join(cells)}" for i, cells in enumerate(grid)]
    axis = f"{'':7} +{'-' * width}\n{'':9}{first:<{width // 2}}{last:>{width // 2}}"
    return "\n".join([f"   loss   {legend}", *lines, axis, f"{'iteration':^{width + 9}}"])


def braille(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve as lines of braille characters, each of two columns and four rows of dots.

    Args:
        values: Equidistant values, without nan. Each column shows the mean of its values.
        width: Characters of a line; fewer are used for few values.
        height: Lines.
    """
    columns = min(2 * width, len(values))
    edges = [len(values) * column // columns for column in range(columns + 1)] if columns else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high, last = min(means, default=0.0), max(means, default=0.0), 4 * height - 1
    rows = [round((high - mean) / (high - low or 1.0) * last) for mean in means]
    cells = [[0x2800] * width for _ in range(height)]
    for column, (before, row) in enumerate(pairwise([*rows[:1], *rows])):
        # The line to the value before is continuous.
        for dot in range(min(row, before + 1), max(row, before - 1) + 1):
            cells[dot // 4][column // 2] |= DOTS[column % 2][dot % 4]
    return ["".join(map(chr, line)) for line in cells]
