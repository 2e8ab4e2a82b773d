"""The report of runs as one HTML page, which needs no other file and no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from megatron_ds.config.data_files import read_text
from megatron_ds.reports.charts import Chart, Runs
from megatron_ds.reports.figures import COLORS, DARK, MARKS, run_style, svg
from megatron_ds.reports.tables import (
    UNKNOWN,
    Table,
    about_table,
    events_table,
    figures_table,
    scaling_table,
    settings_table,
)

SYMBOLS = {"dots": "●", "stars": "★", "restart": "┊", "checkpoint": "▲", "warning": "✕"}
STYLE = read_text(__file__, "page.css")
"""In which LIGHT, DARK and TABS are placeholders for rules that the charts determine."""


def page(runs: Runs, charts: Sequence[Chart], peak_tflops: float | None = None) -> str:
    """The page.

    Args:
        runs: Their histories.
        charts: The charts to show.
        peak_tflops: Peak of a device in 10^12 operations per second, for the MFU.
    """
    losses = [chart for chart in charts if chart.name.startswith("loss-")]
    others = [chart for chart in charts if not chart.name.startswith("loss-")]
    title = f"Training report: {', '.join(runs)}"
    tables = [table for table in (scaling_table(runs),) if table is not None]
    if len(runs) > 1:
        tables.append(settings_table(runs, only_different=True))
    tables.append(events_table(runs))
    body = [
        "<h1>Training report</h1>",
        *(_table(about) if (about := about_table(runs)).rows else ()),
        *_table(figures_table(runs, peak_tflops), keys=list(runs)),
        "<h2>Loss</h2>",
        "<p>A chart that is selected, by a click or Tab, is larger.</p>",
        *_tabs(losses),
        "<h2>Training</h2>",
        '<div class="charts">',
        *(_figure(chart) for chart in others if not _is_constant(chart)),
        "</div>",
        *(f"<p>{escape(_constant(chart))}</p>" for chart in others if _is_constant(chart)),
        *(line for table in tables for line in _table(table)),
        "<details><summary>All settings</summary>",
        *_table(settings_table(runs, only_different=False)),
        "</details>",
    ]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_style(losses)}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(body) + "\n</body>\n</html>\n"


def _is_constant(chart: Chart) -> bool:
    return all(len(line.y) > 1 and line.y.min() == line.y.max() for line in chart.lines)


def _constant(chart: Chart) -> str:
    values = dict.fromkeys(f"{line.label} {line.y[0]:,.4g}".strip() for line in chart.lines)
    return f"{chart.title}, which did not change: {', '.join(values)}"


def _style(losses: Sequence[Chart]) -> str:
    shown = (f".tabs:has(#{chart.name}:checked) .{chart.name}" for chart in losses)
    style = STYLE.replace("TABS", ", ".join(shown))
    for theme, colors in (("LIGHT", COLORS), ("DARK", DARK)):
        variables = (f"--run{index}: {color};" for index, color in enumerate(colors))
        style = style.replace(theme, " ".join(variables))
    return style


def _figure(chart: Chart, name: str = "") -> str:
    text = escape(chart.description(), quote=True)
    drawing = svg(chart).replace("<svg ", f'<svg role="img" aria-label="{text}" ', 1)
    title = f"<figcaption>{escape(chart.title)}</figcaption>"
    return f'<figure class="{name}" tabindex="0">{title}{drawing}{_legend(chart)}</figure>'


def _legend(chart: Chart) -> str:
    """The lines of a chart with their colors, then its symbols, each once."""
    entries: dict[str, str] = {}
    for line in sorted(chart.lines, key=lambda line: line.kind in SYMBOLS):
        if line.label and line.kind in ("line", "ideal"):
            index, dashes = run_style(line.color)
            color = f"var(--run{index})"
            if line.kind == "ideal":
                color, dashes = "grey", "dashed"
            style = f"border-top-style: {dashes}; border-top-color: {color}"
            entries[line.label] = f'<span class="line" style="{style}"></span>'
        elif line.label:
            entries[line.label] = f"<span>{SYMBOLS[line.kind]}</span>"
    entries |= {MARKS[mark.kind]: f"<span>{SYMBOLS[mark.kind]}</span>" for mark in chart.marks}
    items = (f"<li>{symbol}{escape(label)}</li>" for label, symbol in entries.items())
    return f"<ul>{''.join(items)}</ul>" if entries else ""


def _tabs(charts: Sequence[Chart]) -> Iterator[str]:
    """One of the charts, chosen by its horizontal axis without a script."""
    yield '<fieldset class="tabs"><legend>Against</legend>'
    for index, chart in enumerate(charts):
        checked = "" if index else " checked"
        button = f'<input type="radio" name="axis" id="{chart.name}"{checked}>'
        yield f"<label>{button} {escape(chart.x_label)}</label>"
    yield from (_figure(chart, chart.name) for chart in charts)
    yield "</fieldset>"


def _table(table: Table, keys: Sequence[str] = ()) -> Iterator[str]:
    """A table with its heading; `keys` are rows whose name follows the color of their run."""
    slug = table.title.split()[-1].lower()
    yield f'<h2>{escape(table.title)}</h2>\n<div class="scroll"><table class="{slug}"><thead><tr>'
    for name, *column in zip(table.header, *table.rows, strict=True):
        yield f'<th scope="col"{_kind(*column)}>{escape(name)}</th>'
    yield "</tr></thead><tbody>"
    for index, row in enumerate(table.rows):
        color = f'<span class="key" style="background: var(--run{index % len(COLORS)})"></span>'
        cells = "".join(f"<td{_kind(text)}>{escape(text)}</td>" for text in row[1:])
        name = f"{color if row[0] in keys else ''}{escape(row[0])}"
        yield f'<tr><th scope="row">{name}</th>{cells}</tr>'
    yield "</tbody></table></div>" if table.rows else "</tbody></table></div><p>None.</p>"


def _kind(*cells: str) -> str:
    """The class of cells that are all numbers or unknown."""
    numbers = (text == UNKNOWN or (text[:1].isdigit() and len(text) < 20) for text in cells)
    return ' class="number"' if cells and all(numbers) else ""
