"""The report of runs as one HTML page, which needs no other file and no network.

Owns the values of the page; page.html and page.css have its text and its form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from megatron_ds.reports.charts import Chart, Runs
from megatron_ds.reports.figures import COLORS, DARK, MARKS, run_style, svg
from megatron_ds.reports.tables import (
    UNKNOWN,
    about_table,
    events_table,
    figures_table,
    scaling_table,
    settings_table,
)

SYMBOLS = {
    "dots": "●",
    "stars": "★",
    "restart": "┊",
    "stage": "⋮",
    "checkpoint": "▲",
    "warning": "✕",
}


def page(runs: Runs, charts: Sequence[Chart], peak_tflops: float | None = None) -> str:
    """The page.

    Args:
        runs: Their histories.
        charts: The charts to show.
        peak_tflops: Peak of a device in 10^12 operations per second, for the MFU.
    """
    different = settings_table(runs, only_different=True) if len(runs) > 1 else None
    tables = (scaling_table(runs), different, events_table(runs))
    return render(
        "page.html",
        runs=list(runs),
        about=about_table(runs),
        figures=figures_table(runs, peak_tflops),
        losses=[chart for chart in charts if chart.name.startswith("loss-")],
        others=[chart for chart in charts if not chart.name.startswith("loss-")],
        tables=[table for table in tables if table is not None],
        settings=settings_table(runs, only_different=False),
    )


def render(template: str, folder: Path | None = None, **values: Any) -> str:
    """A page of a template, in the form of the reports.

    Args:
        template: Name of its file.
        folder: Folder of the file. None: of the reports'.
        values: Its values; `losses` has the charts of which one is shown at a time.
    """
    folders = [Path(__file__).parent, *(() if folder is None else (folder,))]
    environment = Environment(
        loader=FileSystemLoader(folders), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    for function in (are_numbers, legend, svg, variables):
        environment.globals[function.__name__] = function
    return environment.get_template(template).render(light=COLORS, dark=DARK, **values)


def variables(colors: Sequence[str]) -> str:
    """CSS variables with the colors of the runs."""
    return " ".join(f"--run{index}: {color};" for index, color in enumerate(colors))


def legend(chart: Chart) -> list[tuple[str, str, str]]:
    """Label, symbol and, of a line, style: of the lines of a chart, then of its symbols, once."""
    entries: dict[str, tuple[str, str]] = {}
    for line in sorted(chart.lines, key=lambda line: line.kind in SYMBOLS):
        if line.label and line.kind in ("line", "ideal"):
            index, dashes = run_style(line.color)
            color = f"var(--run{index})"
            if line.kind == "ideal":
                color = "grey"
                dashes = "dashed"
            entries[line.label] = "", f"border-top-style: {dashes}; border-top-color: {color}"
        elif line.label:
            entries[line.label] = SYMBOLS[line.kind], ""
    entries |= {MARKS[mark.kind]: (SYMBOLS[mark.kind], "") for mark in chart.marks}
    return [(label, *entry) for label, entry in entries.items()]


def are_numbers(cells: Iterable[str]) -> bool:
    """Whether there are cells, and all are numbers or unknown."""
    numbers = [text == UNKNOWN or (text[:1].isdigit() and len(text) < 20) for text in cells]
    return bool(numbers) and all(numbers)
