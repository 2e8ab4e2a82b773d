"""What charts and tables show, from the files of runs.

Claim (logging): the charts and tables of a report are computed from the files of the runs, and its
page needs no other file
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.reports import tables
from megatron_ds.reports.charts import (
    Chart,
    Line,
    charts_of,
    loss_chart,
    scaling_chart,
    smooth,
    thinned,
)
from megatron_ds.reports.history import History, read_history
from tests.unit.reports.run_files import event, start, steps, write_run


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, History]:
    """Of one rank, and of four ranks that are three times as fast; the second was resumed."""
    slow = steps(range(1, 7))
    slow[0]["seconds"] = 5.0
    slow[1]["skipped"] = True
    slow[2] |= {"lm_loss": None, "skipped": True}
    slow.append({"iteration": 6, "group": "wiki", "validation_loss": 3.5, "ppl": 33.0})
    slow.append({"iteration": 6, "group": "code", "validation_loss": 2.5, "ppl": 12.0})
    fast = steps(range(1, 5), tokens_per_second=192.0, tflops=0.1875, seconds=1 / 6)
    fast += steps(range(5, 9), tokens_per_second=192.0, tflops=0.1875, seconds=1 / 6)
    fast.append({"iteration": 8, "test_loss": 1.25, "ppl": 3.5})
    events = {
        "slow": [start(0), event("memory", 2, peak=3 * 2**30), event("end", 6, status=0)],
        "fast": [
            start(0, 4, lr=0.002),
            event("checkpoint", 4),
            event("checkpoint", 8),
            event("stage", 6, text="decay: it begins"),
            start(4, 4, seconds=104.5, lr=0.002),
            event("warning", 5, text="it is slow"),
        ],
    }
    records = {"slow": slow, "fast": fast}
    return {
        name: read_history(write_run(tmp_path / name, records[name], events[name]))
        for name in records
    }


def shown(chart: Chart) -> dict[str, list[tuple[float, float]]]:
    """The points of the lines with a label."""
    return {
        line.label: list(zip(line.x.tolist(), line.y.tolist(), strict=True))
        for line in chart.lines
        if line.label
    }


def test_losses_against_each_axis_and_the_marks_of_events(runs: dict[str, History]) -> None:
    chart = loss_chart(runs, "tokens", smoothing=0)
    assert shown(chart) == {
        "slow": [(32, 9.0), (64, 8.0), (128, 6.0), (160, 5.0), (192, 4.0)],
        "validation": [(192, 3.5), (192, 2.5)],
        "fast": [(32.0 * each, 10.0 - each) for each in range(1, 9)],
        "test": [(256, 1.25)],
    }
    marks = [(mark.kind, mark.color, mark.x.tolist()) for mark in chart.marks]
    assert marks == [
        ("restart", 1, [128]),
        ("stage", 1, [192]),
        ("checkpoint", 1, [128, 256]),
        ("warning", 1, [160]),
    ]
    for axis, last in (("iteration", 8), ("samples", 32), ("flops", 1e12), ("time", 8 / 6)):
        assert shown(loss_chart(runs, axis, 0))["fast"][-1][0] == pytest.approx(last)


def test_a_smoothed_curve_lies_over_its_raw_values() -> None:
    assert smooth([4.0, 2.0, 8.0], 0.5) == pytest.approx([4.0, 4.0, 40 / 7])


def test_metrics_of_the_steps(runs: dict[str, History]) -> None:
    charts = {chart.name: chart for chart in charts_of(runs, peak_tflops=0.5)}
    assert "loss_scale" not in charts  # no run has one
    assert shown(charts["skipped"])["slow"][-1] == (6, 2)
    assert shown(charts["learning_rate"])["slow"] == [(each, 0.001) for each in range(1, 7)]
    # Without warm-up, which the first step of a process is.
    assert [x for x, _ in shown(charts["tokens_per_second"])["fast"]] == [2, 3, 4, 6, 7, 8]
    assert shown(charts["mfu"])["slow"][0] == pytest.approx((2, 50.0))
    assert shown(charts["validation"]) == {"slow: wiki": [(6, 3.5)], "slow: code": [(6, 2.5)]}
    assert shown(charts["memory"]) == {"slow": [(2, 3.0)]}
    assert "mfu" not in {chart.name for chart in charts_of(runs)}
    description = charts["learning_rate"].description()
    assert "slow from 0.001 to 0.001" in description


def test_scaling_compares_throughput_with_the_ideal(runs: dict[str, History]) -> None:
    chart = scaling_chart(runs)
    table = tables.scaling_table(runs)
    assert chart is not None
    assert table is not None
    assert shown(chart)["measured"] == [(1, 64.0), (4, pytest.approx(192.0))]
    assert shown(chart)["ideal"] == [(1, 64.0), (4, 256.0)]
    assert table.rows == [["slow", "1", "64", "1.00", "100%"], ["fast", "4", "192", "3.00", "75%"]]
    same = {"a": runs["slow"], "b": runs["slow"]}
    assert scaling_chart(same) is tables.scaling_table(same) is None
    runs["fast"].settings["--hidden-size"] = 128  # another model
    assert scaling_chart(runs) is tables.scaling_table(runs) is None


def test_runs_on_equally_many_ranks_are_points_without_a_line(runs: dict[str, History]) -> None:
    chart = scaling_chart({**runs, "again": runs["slow"]})
    assert chart is not None
    assert [(line.kind, len(line.x)) for line in chart.lines] == [("ideal", 3), ("dots", 3)]


def test_speeds_are_compared_for_equal_batches_only(
    runs: dict[str, History], tmp_path: Path
) -> None:
    records = steps(range(1, 5), global_batch_size=8)
    other = read_history(write_run(tmp_path / "other", records, [start(0, 2)]))
    assert tables.scaling_table({"slow": runs["slow"], "other": other}) is None


def test_final_figures(runs: dict[str, History]) -> None:
    table = tables.figures_table(runs, peak_tflops=0.5)
    slow, fast = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert slow == {
        "run": "slow",
        "status": "ended with status 0",
        "ranks": "1",
        "steps": "6 of 8",
        "loss (last 10 steps)": "6.0000",
        "validation loss": "wiki 3.5000, code 2.5000",
        "bits per byte": "–",
        "test loss": "–",
        "s/step": "0.500",
        "samples/s": "8.00",
        "tokens/s": "64",
        "TFLOPs per device": "0.25",
        "MFU": "50.0%",
        "peak memory": "3.00 GiB",
        "skipped": "2",
        "restarts": "0",
    }
    names = ("status", "ranks", "s/step", "samples/s", "tokens/s", "restarts", "test loss")
    assert [fast[name] for name in names] == [
        "running",
        "4",
        "0.167",
        "24.00",
        "192",
        "1",
        "1.2500",
    ]


def test_a_fork_is_shown_with_its_parent(runs: dict[str, History], tmp_path: Path) -> None:
    path = write_run(tmp_path, steps(range(5, 9)), [start(4, 1)])
    (tmp_path / "parent.json").write_text(json.dumps({"run": "/runs/base", "iteration": 4}))
    table = tables.figures_table({"fork": read_history(path), "slow": runs["slow"]})
    column = table.header.index("fork of")
    assert [row[column] for row in table.rows] == ["/runs/base at 4", "–"]


@pytest.mark.parametrize(
    ("ranks", "tp_size", "shown"), [(2, 1, "1, then 2"), (1, 2, "1")], ids=["ranks", "layout"]
)
def test_throughput_is_that_of_the_last_layout(
    ranks: int, tp_size: int, shown: str, tmp_path: Path
) -> None:
    records = steps(range(1, 5)) + steps(range(5, 9), seconds=0.25, tokens_per_second=128.0)
    later = start(4, ranks)
    later["config"]["parallel"] = {"tensor_model_parallel_size": tp_size}
    first = start(0, 1)
    first["config"]["parallel"] = {"tensor_model_parallel_size": 1}
    run = read_history(write_run(tmp_path, records, [first, later]))
    speed = tables.throughput(run)
    assert speed is not None
    assert (speed.ranks, speed.tokens_per_second) == (ranks, 128.0)
    table = tables.figures_table({"run": run})
    assert dict(zip(table.header, table.rows[0], strict=True))["ranks"] == shown


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "–"),
        ([start(0)], "no end recorded, last step 1 day, 0:00:00 ago"),
        ([start(0), event("end", 4, error="disk full")], "failed: disk full"),
    ],
)
def test_a_run_without_an_end_has_a_status(
    events: list[dict[str, Any]], expected: str, tmp_path: Path
) -> None:
    run = read_history(write_run(tmp_path, steps(range(1, 5)), events))
    run.written = time.time() - 24 * 3600
    table = tables.figures_table({"run": run})
    assert dict(zip(table.header, table.rows[0], strict=True))["status"] == expected


def test_a_run_is_described_by_its_last_start(tmp_path: Path) -> None:
    first, last = (event("about", each, lines={"layout": f"{each} ranks"}) for each in (1, 2))
    run = read_history(write_run(tmp_path / "a", steps(range(1, 5)), [start(0), first, last]))
    plain = read_history(write_run(tmp_path / "b", steps(range(1, 5)), [start(0)]))
    assert tables.about_table({"a": run, "b": plain}).rows == [["layout", "2 ranks", "–"]]
    assert tables.about_table({"b": plain}).rows == []


def test_settings_that_differ_and_events(runs: dict[str, History]) -> None:
    differing = tables.settings_table(runs, only_different=True)
    assert differing.header == ["argument", "slow", "fast"]
    assert differing.rows == [["--lr", "0.001", "0.002"]]
    unknown = {**runs, "unknown": History()}
    assert [row[0] for row in tables.settings_table(unknown, only_different=True).rows] == ["--lr"]
    assert ["--train-iters", "8", "8"] in tables.settings_table(runs, only_different=False).rows
    assert [row[2:] for row in tables.events_table(runs).rows if row[0] == "fast"] == [
        ["0", "started on 4 ranks"],
        ["4", "resumed on 4 ranks"],
        ["5", "warning: it is slow"],
        ["6", "stage: decay: it begins"],
        ["8", "saved its newest checkpoint"],
    ]


def test_long_lines_keep_their_extremes() -> None:
    x = np.arange(10_000.0)
    y = np.sin(x / 500)
    y[1234] = 7.0
    y[4321] = -7.0
    line = thinned(Line("", 0, x, y), limit=100)
    assert len(line.x) <= 102
    assert (line.y.max(), line.y.min()) == (7.0, -7.0)
    assert (line.x[0], line.x[-1]) == (0, 9999)
