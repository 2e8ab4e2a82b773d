"""Curves of a run as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character's dots, by column and row from the top."""


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
    low = min(means, default=0.0)
    high = max(means, default=0.0)
    last = 4 * height - 1
    rows = [round((high - mean) / (high - low or 1.0) * last) for mean in means]
    cells = [[0x2800] * width for _ in range(height)]
    for column, (before, row) in enumerate(pairwise([*rows[:1], *rows])):
        # The line to the value before is continuous.
        for dot in range(min(row, before + 1), max(row, before - 1) + 1):
            cells[dot // 4][column // 2] |= DOTS[column % 2][dot % 4]
    return ["".join(map(chr, line)) for line in cells]
