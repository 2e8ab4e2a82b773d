"""The report of a ladder as one HTML page, in the form of the reports of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_ds.ladder.derive import HEADER, row
from megatron_ds.ladder.results import (
    BY_OPERATIONS,
    Measured,
    Results,
    law_text,
    predict,
    values_of,
)
from megatron_ds.ladder.runs import history_of
from megatron_ds.reports.charts import Chart, Line, loss_chart
from megatron_ds.reports.page import render
from megatron_ds.reports.tables import Table
from megatron_ds.scaling.law import Fit

POINTS = 60
"""Points of a curve."""
BEYOND = 1.5
"""Factor by which curves continue beyond the first and the last point."""
UNIT = "nats per token"


def write_page(results: Results, path: Path) -> None:
    """Writes the page."""
    text = render(
        "ladder.html",
        Path(__file__).parent,
        name=results.ladder.folder.resolve().name,
        prediction=results.prediction.text(),
        charts=list(charts(results)),
        tables=list(tables(results)),
        losses=[],
    )
    path.write_text(text, encoding="utf-8")


def charts(results: Results) -> Iterator[Chart]:
    """The losses against the operations, the agreement with the laws, and the curves of the
    runs."""
    for result in results.fits:
        if result.law.terms == BY_OPERATIONS:
            yield _law_chart(results, result)
    yield _agreement_chart(results, results.fits[-1])
    names = [item.run.name for item in results.measured]
    histories = {item.run.name: history_of(results.ladder, item.run) for item in results.measured}
    known = {name: histories[name] for name in names}
    yield loss_chart({name: run for name, run in known.items() if run is not None}, "tokens")


def _law_chart(results: Results, result: Fit) -> Chart:
    """Losses, the law with its bounds, and the prediction."""
    target = results.ladder.target
    runs = [item.run for item in results.measured]
    operations = [run.operations for run in (*runs, target)]
    x = np.geomspace(min(operations) / BEYOND, max(operations) * BEYOND, POINTS)
    middle, low, high = result.curves(x[:, None], results.prediction.level)
    measured = np.array([item.loss for item in results.measured])
    predicted = np.array([results.prediction.loss])
    level = f"{results.prediction.level:.0%} of the resampled laws"
    lines = (
        Line(level, 0, x, low, "ideal"),
        Line("", 0, x, high, "ideal"),
        Line("law", 0, x, middle),
        Line("runs", 0, values_of(BY_OPERATIONS, runs)[:, 0], measured, "dots"),
        Line("predicted", 1, np.array([target.operations]), predicted, "dots"),
    )
    label = f"loss ({UNIT})"
    return Chart("law", "Loss by operations", "operations", label, lines, is_logarithmic=True)


def _agreement_chart(results: Results, result: Fit) -> Chart:
    """Deviations of the losses from the law."""
    runs = [item.run for item in results.measured]
    expected = np.array([predict(result, run, results.prediction.level).loss for run in runs])
    deviations = 100 * (np.array([item.loss for item in results.measured]) / expected - 1)
    tokens = np.array([run.tokens for run in runs], dtype=float)
    order = tokens.argsort()
    line = Line("", 0, tokens[order], deviations[order], "dots")
    return Chart(
        "agreement",
        "Deviation from the law",
        "tokens",
        "% of the loss",
        (line,),
        baselines={"law": 0.0},
    )


def tables(results: Results) -> Iterator[Table]:
    """The runs with their losses, and the laws."""
    rows = [
        (*row(item.run), f"{item.loss:.4f}", *_expected(results, item)) for item in results.measured
    ]
    target = (*row(results.ladder.target), "", f"{results.prediction.loss:.4f}")
    yield Table("Runs", (*HEADER, "loss", "by the law"), [*rows, target])
    yield Table(
        "Laws",
        ("by", "law", "deviation of a run"),
        [
            (" and ".join(item.law.terms), law_text(item.law), f"{item.noise:.2%}")
            for item in results.fits
        ],
    )


def _expected(results: Results, item: Measured) -> tuple[str]:
    """Loss of a run by the law that predicts."""
    return (f"{predict(results.fits[-1], item.run, results.prediction.level).loss:.4f}",)
