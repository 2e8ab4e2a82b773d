"""Draws charts with matplotlib: files, and SVG for a page whose colors follow its theme."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FormatStrFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy

from megatron_ds.reports.charts import Chart, Line

COLORS = ("#0b62b8", "#c2410c", "#0a7a55", "#9b3d9b", "#7a5c00", "#00707a")
"""Colors of the runs in a light theme; `DARK` has the colors in a dark one."""
DARK = ("#6cb6ff", "#ff9a62", "#4cd4a0", "#e29ae2", "#e0b93c", "#5fd3dd")
TEXT = "#1b1f24"
GRID = "#d0d7de"
DASHES = ("solid", "dashed", "dotted")
"""Line styles of the first runs, and of further ones, which have the same colors."""
MARKS = {"restart": "resumed"} | {name: name for name in ("stage", "checkpoint", "warning")}
LINES = {"restart": "--", "stage": ":"}
"""Styles of the marks that are vertical lines."""
PAGE_SIZE = (5.0, 3.2)
"""Inches of a chart in a page, whose letters are readable on a phone."""
FILE_SIZE = (9.0, 5.5)
"""Inches of a chart in a file of its own."""
STYLE = {
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
MAX_MARKS = 60
FROM_ZERO = ("global_batch_size", "loss_scale", "memory", "scaling", "skipped")
"""Charts whose vertical axis begins with 0."""


def figure(chart: Chart, *, for_page: bool = False) -> Figure:
    """The figure of a chart; that for a page is smaller, without title and legend."""
    with rc_context(STYLE):
        drawn = Figure(figsize=PAGE_SIZE if for_page else FILE_SIZE, layout="constrained")
        axes = drawn.subplots()
        scale, x_label = _time_scale(chart)
        is_colored = len({line.color for line in chart.lines}) > 1
        for line in chart.lines:
            _draw_line(drawn, axes, line, scale, is_colored)
        _draw_marks(axes, chart, scale)
        for name, value in chart.baselines.items():
            axes.axhline(value, color="grey", linestyle="--", label=name)
        axes.set_xlabel(x_label)
        axes.set_ylabel(chart.y_label)
        _format(axes, chart)
        if for_page:
            return drawn
        axes.set_title(chart.title)
        if labels := axes.get_legend_handles_labels()[1]:
            columns = max(1, min(4, 90 // (max(map(len, labels)) + 6)))
            drawn.legend(loc="outside lower center", ncols=columns, frameon=False)
    return drawn


def _time_scale(chart: Chart) -> tuple[float, str]:
    """Seconds of a unit of the horizontal axis, and the label with the unit."""
    if chart.unit != "s":
        return 1.0, chart.x_label
    longest = max(line.x[-1] for line in chart.lines)
    scale, unit = (3600.0, "hours") if longest > 2 * 3600 else (60.0, "minutes")
    return scale, f"{chart.x_label} ({unit})"


def run_style(run: int) -> tuple[int, str]:
    """Number of the color of a run, and its dashes."""
    return run % len(COLORS), DASHES[run // len(COLORS) % len(DASHES)]


def _draw_line(drawn: Figure, axes: Any, line: Line, scale: float, several: bool) -> None:
    index, dashes = run_style(line.color)
    color = COLORS[index]
    x = line.x / scale
    if line.kind == "faint":
        axes.plot(x, line.y, color=color, alpha=0.3, linewidth=0.8)
    elif line.kind == "ideal":
        axes.plot(x, line.y, color="grey", linestyle="--", label=line.label)
    elif line.kind == "line":
        marker = "o" if len(x) == 1 else ""
        axes.plot(x, line.y, linestyle=dashes, color=color, marker=marker, label=line.label)
    else:
        # A test follows the last validation, and its point would cover it.
        offset = offset_copy(axes.transData, drawn, x=9, units="points")
        transform = axes.transData if line.kind == "dots" else offset
        marker, size = ("o", 7) if line.kind == "dots" else ("*", 13)
        color = color if several else COLORS[1]
        (marks,) = axes.plot(x, line.y, marker, transform=transform, label=line.label)
        marks.set(color=color, markersize=size, markeredgecolor="white", zorder=3, clip_on=False)


def _draw_marks(axes: Any, chart: Chart, scale: float) -> None:
    """Lines where runs were resumed or a stage began, triangles at checkpoints, crosses at
    warnings."""
    named = set[str]()
    for mark in chart.marks:
        x = mark.x[:: 1 + len(mark.x) // MAX_MARKS] / scale
        color = COLORS[mark.color % len(COLORS)]
        label = None if mark.kind in named else MARKS[mark.kind]
        named.add(mark.kind)
        transform = axes.get_xaxis_transform()
        if mark.kind in LINES:
            for index, position in enumerate(x):
                style = {"color": color, "linestyle": LINES[mark.kind], "linewidth": 0.6}
                axes.axvline(position, label=None if index else label, **style)
            continue
        height, marker = (0.03, "^") if mark.kind == "checkpoint" else (0.97, "x")
        style = {"color": color, "markersize": 6, "linestyle": "", "clip_on": False}
        axes.plot(x, [height] * len(x), marker, transform=transform, label=label, **style)


def _format(axes: Any, chart: Chart) -> None:
    """Numbers with prefixes of units, integer iterations, and a grid."""
    axes.grid(alpha=0.6)
    axes.margins(x=0.03)
    if chart.is_logarithmic:
        _scale_logarithmically(axes)
        return
    largest_x = max((abs(line.x).max() for line in chart.lines if len(line.x)), default=0)
    largest_y = max((abs(line.y).max() for line in chart.lines if len(line.y)), default=0)
    if chart.unit != "s":
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=largest_x > 4))
        if largest_x >= 1e4:
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if largest_y >= 1e4:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    elif 0 < largest_y < 1e-2:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    if chart.name in FROM_ZERO:
        axes.set_ylim(0, 1.1 * largest_y or 1)


def _scale_logarithmically(axes: Any) -> None:
    """Logarithmic axes, of which the vertical one has a few plain numbers."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FormatStrFormatter("%.3g"))


def svg(chart: Chart) -> str:
    """A chart as an SVG element with text, whose colors are CSS variables."""
    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.name, "font.size": 11}):
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawn = figure(chart, for_page=True)
        drawn.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue().decode()
    text = text[text.index("<svg ") :].rstrip()
    # Every chart of a page would have the same names of groups, which nothing refers to.
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r"\n\s*", " ", re.sub(r"<!--.*?-->", "", text))
    text = re.sub(r"\d+\.\d{6}\b", lambda match: f"{float(match[0]):.2f}", text)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    named = ((f"run{index}", color) for index, color in enumerate(COLORS))
    for name, color in (("text", TEXT), ("grid", GRID), *named):
        text = text.replace(color, f"var(--{name})")
    return text


def save(chart: Chart, path: Path) -> None:
    """Writes the figure of a chart; the suffix of the file is the format."""
    figure(chart).savefig(path, dpi=120)
