"""metrics.jsonl: valid JSON and one record per step, after crashes and resumes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers.events import EVENTS, EventLog
from megatron_ds.training.loggers.jsonl_logger import JsonLines
from megatron_ds.training.loggers.selection import open_loggers
from tests.problems import printed_codes
from tests.unit.training.logger_records import documented, evaluation, step, task_results


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def reject(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=reject) for line in lines]


def iterations(path: Path) -> list[int]:
    return [record["iteration"] for record in read(path)]


def test_steps_have_the_documented_keys_in_order(path: Path) -> None:
    path = path.with_name("below") / path.name
    JsonLines(path, 0).log_steps([step(1)])
    (record,) = read(path)
    assert list(record) == [row[0] for row in documented("metrics.jsonl")]
    assert record["lm_loss"] == 9.0
    assert record["loss_scale"] is None
    assert record["skipped"] is False


def test_further_metrics_follow_under_their_names(path: Path) -> None:
    JsonLines(path, 0).log_steps([step(1, extras={"aux loss": 0.25, "router z-loss": 2.0})])
    (record,) = read(path)
    assert list(record.items())[-2:] == [("aux loss", 0.25), ("router z-loss", 2.0)]
    assert "extras" not in record


def test_numbers_that_json_lacks_become_null(path: Path) -> None:
    nan = float("nan")
    inf = float("inf")
    JsonLines(path, 0).log_steps([step(1, lm_loss=nan, grad_norm=inf, nan=True, skipped=True)])
    (record,) = read(path)
    assert (record["lm_loss"], record["grad_norm"]) == (None, None)
    assert (record["nan"], record["skipped"]) == (True, True)


def test_records_can_be_read_during_the_run(path: Path) -> None:
    logger = JsonLines(path, 0)
    logger.log_steps([step(1), step(2)])
    assert iterations(path) == [1, 2]
    logger.log_eval(evaluation(2))
    assert read(path)[-1] == {
        "iteration": 2,
        "validation_loss": 2.0,
        "ppl": pytest.approx(7.389056),
    }


def test_a_resumed_run_has_every_step_once(path: Path) -> None:
    before = JsonLines(path, 0)
    before.log_steps([step(1), step(2), step(3)])
    before.log_eval(evaluation(3))
    before.close()
    resumed = JsonLines(path, 2)
    assert iterations(path) == [1, 2]
    resumed.log_steps([step(3, seconds=0.75)])
    resumed.log_eval(evaluation(3))
    assert iterations(path) == [1, 2, 3, 3]
    assert [record.get("seconds") for record in read(path)] == [0.5, 0.5, 0.75, None]
    assert [item.name for item in path.parent.iterdir()] == ["metrics.jsonl"]


def test_evaluations_name_their_dataset(path: Path) -> None:
    logger = JsonLines(path, 0)
    for group in ("", "A", "B", "A"):
        logger.log_eval(evaluation(1, "test", group, 0.75 if group else None))
    assert read(path) == [
        {"iteration": 1, **named, "test_loss": 2.0, "ppl": pytest.approx(7.389056), **bits}
        for named, bits in (
            ({}, {}),
            ({"group": "A"}, {"bits_per_byte": 0.75}),
            ({"group": "B"}, {"bits_per_byte": 0.75}),
        )
    ]


def test_an_evaluation_of_the_same_weights_is_written_once(path: Path) -> None:
    first = JsonLines(path, 0)
    first.log_steps([step(1)])
    first.log_eval(evaluation(1))
    first.log_eval(evaluation(1))
    first.log_eval(evaluation(1, "test"))
    first.log_task(task_results(1))
    first.close()
    again = JsonLines(path, 1)
    again.log_eval(evaluation(1))
    again.log_task(task_results(1))
    assert [set(record) - {"iteration", "ppl"} for record in read(path)[1:]] == [
        {"validation_loss"},
        {"test_loss"},
        {"task", "METRIC"},
    ]


@pytest.mark.parametrize("tail", ['{"iteration": 2, "consu', "\0\0\0", '{"iteration": "'])
def test_an_incomplete_last_line_is_dropped(path: Path, tail: str) -> None:
    JsonLines(path, 0).log_steps([step(1)])
    with path.open("a", encoding="utf-8") as file:
        file.write(tail)
    JsonLines(path, 5).log_steps([step(2)])
    assert iterations(path) == [1, 2]


def test_a_last_line_without_newline_is_kept(path: Path) -> None:
    JsonLines(path, 0).log_steps([step(1)])
    path.write_text(path.read_text(encoding="utf-8").rstrip("\n"), encoding="utf-8")
    JsonLines(path, 1).log_steps([step(2)])
    assert iterations(path) == [1, 2]


@pytest.mark.parametrize("line", ["my notes", '{"iteration": 1e400}', "[" * 100_000, "{}"])
def test_a_damaged_file_is_set_aside_and_its_records_are_kept(path: Path, line: str) -> None:
    """Claim (checkpoints): a damaged line of `metrics.jsonl`, pointers that are no files and linked
    checkpoints stop no resume"""
    content = f'{{"iteration": 1}}\n{line}\n{{"iteration": 2}}\n{{"iteration": 3}}\n'
    path.write_text(content, encoding="utf-8")
    logged: list[str] = []
    JsonLines(path, 2, warn=logged.append).log_steps([step(3)])
    assert iterations(path) == [1, 2, 3]
    assert (path.parent / "metrics.jsonl.1").read_text(encoding="utf-8") == content
    assert printed_codes("\n".join(logged)) == ["metrics-file-damaged"]
    assert f"{path}, line 2" in logged[0]


def test_new_runs_keep_older_files_under_numbers(path: Path) -> None:
    for last in (3, 2, 1):
        JsonLines(path, 0).log_steps([step(iteration) for iteration in range(1, last + 1)])
    assert iterations(path) == [1]
    assert iterations(path.with_name("metrics.jsonl.1")) == [1, 2, 3]
    assert iterations(path.with_name("metrics.jsonl.2")) == [1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_records_after_the_removal_of_the_folder_are_written(path: Path) -> None:
    """Claim (checkpoints): a `--save` folder that is removed during a save costs the checkpoints in
    it: the next save creates it, and `metrics.jsonl` continues"""
    folder = path.parent / "run"
    log = JsonLines(folder / path.name, 0)
    log.log_steps([step(1)])
    shutil.rmtree(folder)
    log.log_steps([step(2)])
    log.log_steps([step(3)])
    assert iterations(folder / path.name) == [2, 3]


def test_a_full_disk_delays_records_without_loss(path: Path) -> None:
    logged: list[str] = []
    logger = JsonLines(path, 0, warn=logged.append)
    logger.log_steps([step(1)])
    descriptor = logger._file.fileno()
    own = os.dup(descriptor)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    logger.log_steps([step(2)])
    logger.log_steps([step(3)])
    assert iterations(path) == [1]
    assert len(logged) == 1
    assert "[metrics-jsonl-unwritable]" in logged[0]
    assert str(path) in logged[0]
    os.dup2(own, descriptor)
    logger.log_steps([step(4)])
    assert iterations(path) == [1, 2, 3, 4]
    os.close(own)
    os.close(full)


def test_a_run_that_lost_its_folder_writes_no_record(path: Path, tmp_path: Path) -> None:
    """In any of the files; those that follow metrics.jsonl are in the same folder."""
    holds = [True]
    table = tmp_path / "metrics.csv"
    config = Config().with_values({"metrics_jsonl": str(path), "metrics_csv": str(table)})
    loggers = open_loggers(
        config,
        TrainState(),
        save=None,
        world_size=1,
        dp_size=1,
        write=print,
        may_write=lambda: holds[0],
    )
    events = EventLog()
    events.may_write = lambda: holds[0]
    events.start(tmp_path, config, 0)
    for iteration in (1, 2):
        for logger in loggers:
            logger.log_steps([step(iteration)])
        events.record("checkpoint", iteration=iteration)
        holds[0] = False
    for logger in loggers:
        logger.close()
    assert iterations(path) == [1]
    assert len(table.read_text().splitlines()) == 2  # with the header
    assert len((tmp_path / EVENTS).read_text().splitlines()) == 2  # with the start


@pytest.mark.parametrize("iteration", [0, 1])
def test_special_file_is_neither_renamed_nor_replaced(
    path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int
) -> None:
    """As --metrics-jsonl /dev/null, which root can rename."""
    monkeypatch.setattr(JsonLines, "_keep", lambda *_: pytest.fail("it is rewritten"))
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        JsonLines(path, iteration).log_steps([step(2)])
        assert json.loads(os.read(reader, 1 << 16))["iteration"] == 2
    finally:
        os.close(reader)
    assert os.listdir(path.parent) == [path.name]
    assert path.is_fifo()
