"""Which steps are profiled, and what is written of them."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.launch import output
from megatron_ds.launch.device import memory_history
from megatron_ds.train_state import TrainState
from megatron_ds.training.profile.profiling import Profiling, open_profiling, profile_folder

PROFILER = "megatron_ds.training.profile.profiler"


def config_with(**logging: object) -> Config:
    return Config().with_values(logging)


def profiling(monkeypatch: pytest.MonkeyPatch, *, rank: int = 0) -> tuple[Profiling, list[object]]:
    """A profile of the iterations 3 and 4 of rank 0, and what its session does."""
    calls: list[object] = []

    class Session:
        def __init__(self, engine: object, folder: Path, name: str, write: object) -> None:
            calls.append(str(folder / name))

        def next_step(self, iteration: int) -> None:
            calls.append(iteration)

        def finish(self) -> None:
            calls.append("finish")

    monkeypatch.setitem(sys.modules, PROFILER, SimpleNamespace(ProfilerSession=Session))
    config = config_with(profile=True, profile_step_start=2, profile_step_end=4)
    profile = Profiling(config, MagicMock(), Path("f"), rank, print, calls.append)
    return profile, calls


def train(profile: Profiling, iterations: range) -> None:
    for iteration in iterations:
        profile.before_step(iteration)
        profile.after_step(iteration)
    profile.finish()


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [
        (range(1, 7), ["f/rank0-iteration3", 3, 4, "finish"]),
        (range(1, 4), ["f/rank0-iteration3", 3, "finish"]),  # the run ends in it
        (range(4, 7), ["f/rank0-iteration4", 4, "finish"]),  # a resumed run begins in it
        (range(1, 3), []),
        (range(5, 7), []),
    ],
)
def test_the_profile_has_the_steps_of_its_window(
    iterations: range, expected: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, calls = profiling(monkeypatch)
    train(profile, iterations)
    assert calls == expected


def test_the_profile_ends_with_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, calls = profiling(monkeypatch)
    for iteration, ends in ((3, False), (4, True)):
        profile.before_step(iteration)
        assert "finish" not in calls
        profile.after_step(iteration)
        assert ("finish" in calls) == ends


def test_other_ranks_take_none(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, calls = profiling(monkeypatch, rank=1)
    train(profile, range(1, 7))
    assert calls == []


def test_the_profiler_is_imported_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim (logging): outside its steps a profile leaves functions and modules as they are, and
    imports no profiler before"""
    profile, _ = profiling(monkeypatch)
    monkeypatch.delitem(sys.modules, PROFILER)
    profile.before_step(1)
    profile.before_step(2)
    assert PROFILER not in sys.modules
    monkeypatch.setattr(Path, "mkdir", MagicMock(side_effect=OSError))
    profile.before_step(3)
    assert PROFILER in sys.modules


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warned: list[Problem] = []
    config = config_with(profile=True, profile_step_start=0, profile_step_end=2)
    profile = Profiling(config, MagicMock(), tmp_path / "file", 0, print, warned.append)
    train(profile, range(1, 3))
    assert [problem.code for problem in warned] == ["profile-not-written"]


def test_a_session_writes_a_trace_and_a_summary_of_its_steps(tmp_path: Path) -> None:
    from megatron_ds.training.profile.profiler import ProfilerSession

    opened: list[Any] = []

    @contextmanager
    def marked(open_region: Any) -> Any:
        opened.append(open_region)
        yield
        opened.clear()

    written: list[str] = []
    engine = SimpleNamespace(marked=marked)
    session = ProfilerSession(engine, tmp_path, "p", written.append)  # type: ignore[arg-type]
    for iteration in (7, 8):
        session.next_step(iteration)
        with opened[0]("product"):
            kept = torch.ones(512, 512) @ torch.ones(512, 512)
    session.finish()
    assert opened == []
    assert kept.sum() > 0
    events = json.loads((tmp_path / "p.trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert sorted(names) == ["iteration 7", "iteration 8", "product", "product"]
    rows = {line.split()[0]: line.split() for line in written[0].splitlines() if line.strip()}
    assert rows["product"][-1] == "2"  # calls
    assert "aten::mm" in rows
    assert (tmp_path / "p.summary.txt").read_text() == f"{written[0]}\n"
    assert "memory.pickle" not in str(list(tmp_path.iterdir()))


@pytest.mark.parametrize(
    ("iteration", "last", "warns"),
    [(0, 100, False), (0, 10, True), (0, 11, False), (11, 11, True), (12, 50, False)],
)
def test_a_run_that_ends_before_the_profile_is_warned(
    iteration: int, last: int, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default the profile has the iterations 11 and 12; after them it is complete."""
    warned: list[Problem] = []
    monkeypatch.setattr(output, "warn_on_rank", warned.append)
    state = TrainState(iteration=iteration)
    opened = open_profiling(config_with(profile=True), MagicMock(), Path("s"), 0, state, last)
    assert opened is not None
    assert [problem.code for problem in warned] == ["profile-after-the-end"] * warns
    assert open_profiling(config_with(), MagicMock(), None, 0, state, last) is None


def test_a_device_that_records_its_memory_writes_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = MagicMock()
    monkeypatch.setattr(torch, "get_device_module", lambda name: SimpleNamespace(memory=memory))
    with memory_history(tmp_path / "h"):
        memory._record_memory_history.assert_called_once_with(max_entries=1_000_000)
    memory._dump_snapshot.assert_called_once_with(str(tmp_path / "h"))
    memory._record_memory_history.assert_called_with(enabled=None)


def test_the_folder_is_given_or_next_to_other_files() -> None:
    save = Path("s")
    assert profile_folder(config_with(profile_dir="p", tensorboard_dir="t"), save) == Path("p")
    assert profile_folder(config_with(tensorboard_dir="t"), save) == Path("t/profile")
    assert profile_folder(config_with(), save) == Path("s/profile")
