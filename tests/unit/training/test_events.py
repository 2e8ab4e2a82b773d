"""events.jsonl: what happened to a run besides its steps.

Claim (logging): `events.jsonl` has the starts, checkpoints, warnings and end of a run that was
killed and resumed, and the page and the live view show them
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_ds.config import Config
from megatron_ds.launch import output
from megatron_ds.training.loggers.events import EVENTS, EventLog
from tests.problems import printed_codes
from tests.unit.training.logger_records import documented


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def opened(path: Path, iteration: int = 0) -> EventLog:
    log = EventLog(clock=lambda: 12.3456)
    config = Mock(to_dict=lambda: {"a": {"b": float("inf")}})
    position = {"state": {}, "data": None}
    log.start(path.parent, config, iteration, total_iterations=8, ranks=2, **position)
    return log


def test_every_event_has_the_documented_keys(path: Path) -> None:
    log = opened(path)
    log.record("about", lines={})
    log.record("start-up", iteration=1, seconds={"data": 0.1})
    log.record("memory", iteration=1, peak=5)
    log.record("checkpoint", iteration=2, seconds=0.5, waited=0.1)
    log.record("stage", iteration=2, text="decay: its course")
    log.warning("    WARNING: it is slow [some-code]")
    log.record("end", iteration=3, status=0)
    log.record("end", iteration=3, error="no data")
    keys = {
        row[0]: set(row[1].replace("`", "").split()) - {"or"} for row in documented("events.jsonl")
    }
    common = {"event", "iteration", "time"}
    for event in read(path):
        assert common <= set(event)
        assert set(event) - common <= keys[event["event"]], event
    assert keys.keys() == {event["event"] for event in read(path)}
    assert read(path)[0] == {
        "event": "start",
        "iteration": 0,
        "time": 12.346,
        "total_iterations": 8,
        "ranks": 2,
        "config": {"a": {"b": None}},
        "state": {},
        "data": None,
    }


def test_printed_warnings_are_recorded_with_the_last_iteration(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog()
    with output.recording(log.warning):
        output.print_on_rank("WARNING: before the file is known")
        log.start(path.parent, Config(), 4)
        output.print_on_rank(" iteration 5 | a line of the log")
        log.step(5)
        output.print_on_rank("WARNING: later")
    output.print_on_rank("WARNING: after the run")
    assert [(each["iteration"], each.get("text")) for each in read(path)] == [
        (4, None),
        (0, "before the file is known"),
        (5, "later"),
    ]
    assert capsys.readouterr().out.count("\n") == 4


def test_a_resumed_run_appends_and_a_new_one_keeps_the_old_file(path: Path) -> None:
    opened(path)
    opened(path, 3)
    assert [each["iteration"] for each in read(path)] == [0, 3]
    opened(path)
    assert [each["iteration"] for each in read(path)] == [0]
    assert len(read(path.with_name("events.jsonl.1"))) == 2


def test_events_of_a_folder_that_cannot_be_written_are_kept(tmp_path: Path) -> None:
    """They are one warning, although it is an event itself."""
    warnings: list[str] = []

    def warn(text: str) -> None:
        warnings.append(text)
        log.warning(text)

    log = EventLog(warn)
    folder = tmp_path / "no"
    log.start(folder, Config(), 0)
    log.record("checkpoint", iteration=2)
    assert printed_codes("".join(warnings)) == ["metrics-jsonl-unwritable"]
    folder.mkdir()
    log.record("end", iteration=8)
    assert [each["event"] for each in read(folder / EVENTS)] == [
        "start",
        "warning",
        "checkpoint",
        "end",
    ]


def test_without_a_file_nothing_is_written_or_kept_without_bound() -> None:
    log = EventLog()
    for iteration in range(1000):
        log.record("warning", iteration=iteration)
    assert len(log._early) == 100
