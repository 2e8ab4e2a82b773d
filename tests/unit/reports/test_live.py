"""The picture of a run in progress.

Claim (logging): a run in progress is followed by its new bytes, also through incomplete and damaged
lines and a resume
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_ds.reports.live import Follower, frame, status
from megatron_ds.reports.text_plot import braille
from tests.unit.reports.run_files import event, lines, start, steps, write_run


def text(follower: Follower) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(frame("my-run", follower, console.width))
    return capture.get()


@pytest.fixture
def now() -> list[float]:
    """The clock's time, which a test changes."""
    return [1000.0]


@pytest.fixture
def follower(tmp_path: Path, now: list[float]) -> Follower:
    return Follower(tmp_path, clock=lambda: now[0])


def write(folder: Path, last: int, *events: dict[str, Any]) -> None:
    records = steps(range(1, last + 1))
    records[0]["seconds"] = 9.0  # of the warm-up
    write_run(folder, records, [start(0), *events])
    os.utime(folder / "metrics.jsonl", (990, 990))


def test_a_run_without_a_step_waits(follower: Follower, tmp_path: Path) -> None:
    follower.poll()
    assert text(follower) == "my-run: no step yet\n\n"
    (tmp_path / "events.jsonl").write_text(lines([start(0)]))
    follower.poll()
    assert status(follower.history, follower.age).text == "no step yet"


def test_a_frame_shows_progress_curves_and_events(follower: Follower, tmp_path: Path) -> None:
    warnings = [event("warning", 2, text=f"number {each} [some-code]") for each in range(4)]
    write(tmp_path, 6, event("checkpoint", 4), *warnings, start(4, ranks=2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(lines([{"iteration": 6, "validation_loss": 3.5, "ppl": 33.1}]))
    follower.poll()
    shown = text(follower)
    assert "my-run: running" in shown
    assert "iteration 6 of 8 (75%), 0:00:01 left at 0.5 s per step" in shown
    assert "loss 4 (between 4 and 9)" in shown
    assert "tokens/s 64 (between 64 and 64)" in shown
    assert "loss 3.5000 at iteration 6" in shown
    assert re.search(r"^checkpoint +iteration 4 *$", shown, re.MULTILINE)
    assert "1 time, last at iteration 4" in shown
    assert "number 3 [some-code]" in shown
    assert "number 0" not in shown


def test_the_slowest_rank_is_shown(follower: Follower, tmp_path: Path) -> None:
    times = {"time/slowest_rank": 3.0, "time/slowest_rank_excess": 0.125}
    write_run(tmp_path, [*steps(range(1, 4), extras=times), *steps(range(4, 6))], [start(0)])
    follower.poll()
    shown = text(follower)
    assert re.search("slowest rank +3, 12.5% above the median at iteration 3", shown)


def test_a_run_that_writes_nothing_is_late_until_it_writes(
    follower: Follower, tmp_path: Path, now: list[float]
) -> None:
    write(tmp_path, 2)
    follower.poll()
    assert follower.age == 10.0  # by the file's time
    assert not status(follower.history, follower.age).is_late
    now[0] += 50
    follower.poll()
    late = status(follower.history, follower.age)
    assert late.is_late
    assert late.text == "no new step for 0:01:00, 60 times that of a log interval"
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(lines(steps(range(3, 4))))
    os.utime(tmp_path / "metrics.jsonl", (1040, 1040))
    follower.poll()
    assert follower.age == 0.0  # by this machine's clock
    assert status(follower.history, follower.age).text == "running"


def test_the_end_of_a_run_is_that_of_its_last_start(follower: Follower, tmp_path: Path) -> None:
    write(tmp_path, 4, event("end", 4, status=0))
    follower.poll()
    ended = status(follower.history, 0)
    assert (ended.text, ended.has_ended) == ("ended with status 0", True)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(lines([start(4)]))
    follower.poll()
    assert not status(follower.history, 0).has_ended
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(lines([event("end", 5, error="out of data")]))
    follower.poll()
    assert status(follower.history, 0).text == "failed: out of data"


def test_a_damaged_line_is_shown_and_read_again(follower: Follower, tmp_path: Path) -> None:
    write(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("\0\0\n")
    follower.poll()
    assert "line 3: not a metrics record" in follower.problem
    assert "[metrics-line-invalid]" in text(follower)
    assert len(follower.history) == 2


def test_curves_of_dots() -> None:
    rising = [float(value) for value in range(8)]
    assert braille(rising, 4, 2) == ["⠀⠀⡠⠊", "⡠⠊⠀⠀"]
    assert braille([1.0, 1.0], 2, 1) == ["⠉⠀"]
    assert braille([0.0, 9.0, 0.0], 3, 1) == ["⡸⡆⠀"]
    assert braille([], 2, 1) == ["⠀⠀"]
    means = braille([0.0, 2.0] * 48, 2, 1)  # of each column alike
    assert means == ["⠉⠉"]
