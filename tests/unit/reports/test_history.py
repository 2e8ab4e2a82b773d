"""The history of a run from its files, complete or growing.

Claim (logging): a run in progress is followed by its new bytes, also through incomplete and damaged
lines and a resume
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.reports.history import Evaluation, RunReader, names_of, read_history, read_run
from megatron_ds.reports.tables import figures_table
from megatron_ds.training.loggers.csv_logger import CsvTable
from megatron_ds.training.loggers.jsonl_logger import JsonLines
from tests.problems import raises_problem
from tests.unit.reports.run_files import CONFIG, event, lines, start, steps, write_run
from tests.unit.training.logger_records import evaluation, step


def test_columns_evaluations_and_axes(tmp_path: Path) -> None:
    records = steps(range(1, 5))
    records[2]["lm_loss"] = None
    records[3]["aux loss"] = 0.5
    records.insert(2, {"iteration": 2, "validation_loss": 3.5, "ppl": 33.1})
    records.append({"iteration": 4, "group": "code", "test_loss": 2.5, "ppl": 12.2})
    events = [start(0, ranks=2), start(2, ranks=4)]
    run = read_history(write_run(tmp_path, records, events))

    assert run.points() == [(1, 9.0), (2, 8.0), (4, 6.0)]
    assert run.points("aux loss") == [(4, 0.5)]
    assert run.evaluations == [
        Evaluation(2, "validation", "", 3.5),
        Evaluation(4, "test", "code", 2.5),
    ]
    assert run.groups("test") == ["code"]
    assert run.losses("test", "") == []
    assert run.losses("test") == [(4, 2.5)]
    assert run.ranks.tolist() == [2, 2, 4, 4]
    assert run.axis("tokens").tolist() == [32, 64, 96, 128]
    assert run.axis("time").tolist() == [0.5, 1.0, 1.5, 2.0]
    # 0.25 TFLOPs per device for half a second.
    assert run.axis("flops").tolist() == [0.25e12, 0.5e12, 1e12, 1.5e12]
    assert run.place("time", [2, 3.5]).tolist() == [1.0, 1.75]
    assert run.settings["--min-lr"] == 0.0
    assert run.total_iterations == 8


def test_a_run_without_events_has_the_settings_of_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps(range(1, 3)))
    (folder / "events.jsonl").unlink()
    for iteration, lr in ((1, 5e-4), (2, 7e-4)):
        layout = {"tensor_model_parallel_size": 2, "data_parallel_size": 3, "zero_stage": 1}
        run = {"config": {**CONFIG, "optimizer": {"lr": lr}}, "layout": layout}
        (folder / f"global_step{iteration}").mkdir()
        (folder / f"global_step{iteration}" / "run.json").write_text(json.dumps(run))
    run_read = read_history(folder)
    assert run_read.settings["--lr"] == 7e-4
    assert run_read.ranks.tolist() == [6, 6]
    assert run_read.checkpoints == [1, 2]
    assert run_read.total_iterations == 8
    assert np.isnan(read_history(write_run(tmp_path / "bare", steps(range(1, 3)))).ranks).all()


def test_only_new_bytes_are_read_and_a_partial_line_waits(tmp_path: Path) -> None:
    first, second, third = lines(steps(range(1, 4))).splitlines(keepends=True)
    path = tmp_path / "metrics.jsonl"
    reader = RunReader(tmp_path)
    with pytest.raises(FileNotFoundError):
        reader.read()
    path.write_text(first + second[:40])
    assert reader.read() == len(first)
    assert len(reader.history) == 1
    with path.open("a") as file:
        file.write(second[40:])
    assert reader.read() == len(second)
    with path.open("a") as file:
        file.write(third.rstrip("\n"))
    assert reader.read() == len(third) - 1  # complete, although its end of line is missing
    assert reader.read() == 0
    assert reader.history["iteration"].tolist() == [1, 2, 3]


def test_a_damaged_line_is_an_error_until_it_is_complete(tmp_path: Path) -> None:
    """Zeros are what a network folder shows of bytes that have not arrived."""
    first, second = lines(steps(range(1, 3))).splitlines(keepends=True)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(first.encode() + b"\0" * (len(second) - 1) + b"\n")
    reader = RunReader(tmp_path)
    for _ in range(2):
        with raises_problem("metrics-line-invalid", contains="line 2"):
            reader.read()
    path.write_bytes((first + second).encode())
    reader.read()
    assert len(reader.history) == 2


@pytest.mark.parametrize(("last", "is_replaced"), [(3, True), (9, True), (3, False)])
def test_a_resumed_run_replaces_its_later_steps(
    tmp_path: Path, last: int, is_replaced: bool
) -> None:
    """As JsonLines: the file is replaced by one without the steps after the checkpoint, which may
    have more steps when it is read. A file that is truncated has the same effect."""
    folder = write_run(tmp_path, steps(range(1, 6)), [start(0)])
    reader = RunReader(folder)
    reader.read()
    new = tmp_path / ("new" if is_replaced else "metrics.jsonl")
    new.write_text(lines(steps(range(1, last + 1), lm_loss=1.0)))
    os.replace(new, tmp_path / "metrics.jsonl")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("{damaged\n" + lines([start(3, ranks=2)]))
    reader.read()
    assert reader.history.points() == [(each, 1.0) for each in range(1, last + 1)]
    assert [each["iteration"] for each in reader.history.of("start")] == [0, 3]


def test_a_history_ends_with_the_iteration_that_is_asked_for(tmp_path: Path) -> None:
    events = [start(0), event("checkpoint", 2), event("warning", 5, text="w")]
    folder = write_run(tmp_path, steps(range(1, 7)), events)
    (folder / "global_step4").mkdir()
    run = read_history(folder, until=3)
    assert run["iteration"].tolist() == [1, 2, 3]
    assert run.of("warning") == []
    assert run.checkpoints == [2]


def test_a_run_that_continues_another_begins_with_its_steps_and_events(tmp_path: Path) -> None:
    warning = event("warning", 2, text="w")
    first = write_run(tmp_path / "a", steps(range(1, 6)), [start(0, ranks=2), warning])
    later = start(3, ranks=4)
    later["config"]["checkpoint"] = {"load": str(first)}
    second = write_run(tmp_path / "b", steps(range(4, 7)), [later])
    run = read_run(second)
    assert run["iteration"].tolist() == [1, 2, 3, 4, 5, 6]
    assert run.ranks.tolist() == [2, 2, 2, 4, 4, 4]
    assert run.of("warning") == [warning]
    assert read_run(second / "metrics.jsonl").axis("time")[-1] == 3.0


def test_names_are_those_of_the_folders_unless_two_are_equal(tmp_path: Path) -> None:
    paths = [str(tmp_path / "a"), str(tmp_path / "b" / "metrics.jsonl")]
    assert names_of(paths) == ["a", "b"]
    assert names_of([*paths, str(tmp_path / "x" / "a")])[0] == str(tmp_path / "a")


def test_a_table_has_the_history_of_the_records(tmp_path: Path) -> None:
    extras = {"bits_per_byte": 0.5, "next_token_accuracy": 0.25}
    losses = [
        dataclasses.replace(evaluation(2), extras=extras),
        evaluation(4, "test", "code", 0.75),
    ]
    skipped = step(2, lm_loss=float("nan"), skipped=True)
    records = [step(1), skipped, step(3), step(4, extras={"aux": 0.5})]
    loggers = [CsvTable(tmp_path / "table", 0), JsonLines(tmp_path / "metrics.jsonl", 0)]
    for logger in loggers:
        logger.log_steps(records[:2])
        logger.log_eval(losses[0])
        logger.log_steps(records[2:])
        logger.log_eval(losses[1])
        logger.close()
    table, history = map(read_history, (tmp_path / "table", tmp_path / "metrics.jsonl"))
    assert table.evaluations == history.evaluations
    assert [item.extras for item in table.evaluations] == [
        extras,
        {"bits_per_byte": 0.75},
    ]
    for key in history.columns:
        assert np.array_equal(table[key], history[key], equal_nan=True), key
    figures = figures_table({"run": table})
    assert figures.rows[0][figures.header.index("next token accuracy")] == "0.2500"


def test_a_row_of_a_growing_table_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("iteration,lm_loss\n1,3.5\n2,3.2")
    reader = RunReader(path)
    reader.read()
    assert reader.history.points() == [(1, 3.5)]
    with path.open("a") as file:
        file.write("5\n")
    reader.read()
    assert reader.history.points() == [(1, 3.5), (2, 3.25)]


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffname,step,loss,lr\r\nx,1,3.5,0.1\r\nx,2,3.25,0.1\r\n",
        '{"step": 1, "train_loss": 3.5, "name": "x"}\n{"step": 2, "train_loss": 3.25}\n',
        "step,iteration,loss\n10,1,3.5\n20,2,3.25\n",
    ],
)
def test_keys_of_other_programs_are_known(content: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_text(content, encoding="utf-8")
    assert read_history(path).points() == [(1, 3.5), (2, 3.25)]


@pytest.mark.parametrize("content", ["it 1, loss 3\n", "a,b\n1,2\n", "step,loss\n1\n", "[1]\n"])
def test_other_files_are_named_with_their_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(content)
    with raises_problem("metrics-line-invalid", contains=f"{path}, line "):
        read_history(path)
