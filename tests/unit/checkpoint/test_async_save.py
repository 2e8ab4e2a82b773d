"""Saves in the background: what they leave at any moment, and that they never interleave.

Claim (checkpoints): training continues while a slow disk writes; saves never interleave; a run ends
after its last save
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint import saving
from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.local_files import INCOMPLETE
from megatron_ds.checkpoint.folders import run_lock
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import check_names, list_checkpoints
from megatron_ds.checkpoint.save_steps import SaveError
from megatron_ds.config import CheckpointConfig
from megatron_ds.engine.deepspeed import checkpoint_io
from megatron_ds.engine.deepspeed.checkpoint_io import DeepSpeedSnapshot
from megatron_ds.training.saving import Saver
from tests.unit.checkpoint.fakes import (
    FakeEngine,
    FakeSnapshot,
    Managers,
    begin,
    fail_at,
    load,
    names_in,
    save,
    state_at,
)

DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def advance_until(checkpoints: CheckpointManager, reached: Callable[[], bool]) -> int:
    """Advances without waiting, as the training loop does; returns how often."""
    for count in range(10_000):
        if reached():
            return count
        checkpoints.saving.advance(wait=False)
        time.sleep(0.001)
    raise AssertionError("the save does not advance")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Every snapshot waits for this event before it is written."""
    is_fast = threading.Event()
    write = FakeSnapshot.write

    def write_slowly(snapshot: FakeSnapshot, folder: Path) -> Any:
        assert is_fast.wait(20)
        return write(snapshot, folder)

    monkeypatch.setattr(FakeSnapshot, "write", write_slowly)
    yield is_fast
    is_fast.set()


def incomplete(folder: Path, iteration: int) -> list[Path]:
    """The unfinished folders of a checkpoint."""
    return list(folder.glob(f"{INCOMPLETE}global_step{iteration}-*"))


def test_training_continues_while_the_disk_is_slow(
    checkpoints: CheckpointManager, folder: Path, disk: threading.Event, logged: list[str]
) -> None:
    begin(checkpoints, 4, FakeEngine())
    advance_until(checkpoints, lambda: incomplete(folder, 4))
    for _ in range(20):
        checkpoints.saving.advance(wait=False)
    assert list_checkpoints(folder) == []
    assert checkpoints.newest is None
    assert not any("successfully" in line for line in logged)
    disk.set()
    advance_until(checkpoints, lambda: checkpoints.newest is not None)
    assert checkpoints.newest == folder / "global_step4"
    assert check_names(folder / "global_step4") is None
    assert load(checkpoints)[0] == state_at(4)
    stall, done, written = logged[1:4]
    assert stall.startswith("  stalled 0.")
    assert done.startswith("  successfully saved checkpoint at iteration       4 to ")
    assert "in the background" in written
    assert "waited" not in written


def test_a_checkpoint_has_the_state_of_its_iteration(
    checkpoints: CheckpointManager, folder: Path, disk: threading.Event
) -> None:
    """Whatever the manager and the engine know by the time that it is written."""
    engine = FakeEngine()
    begin(checkpoints, 4, engine)
    engine.content = "of a later iteration"
    engine.offset = 7
    disk.set()
    checkpoints.saving.advance(wait=True)
    found = checkpoints.restoring.select()
    assert found.run.state == state_at(4)
    assert found.run.partitions[0].parameters[0].offset == 0
    assert load(checkpoints)[1].content == "of iteration 4"


def test_a_second_save_waits_for_the_first(
    checkpoints: CheckpointManager, folder: Path, disk: threading.Event, logged: list[str]
) -> None:
    saver = Saver(
        CheckpointConfig(save=str(folder), async_save=True), checkpoints.saving, FakeEngine()
    )
    saver.save(state_at(4), lambda: None, final=False)
    advance_until(checkpoints, lambda: incomplete(folder, 4))
    threading.Timer(0.1, disk.set).start()
    saver.save(state_at(8), lambda: None, final=False)
    assert check_names(folder / "global_step4") is None
    saved = [line.split()[0:2] for line in logged]
    assert saved[3:5] == [["it", "was"], ["saving", "checkpoint"]]
    assert "; training waited" in logged[3]
    saver.save(state_at(12), lambda: None, final=True)
    assert [path.name for path in list_checkpoints(folder)] == [
        "global_step12",
        "global_step8",
        "global_step4",
    ]
    assert logged[-1].startswith("  successfully saved checkpoint at iteration      12")
    assert checkpoints.saving._current is None


def test_a_run_whose_folder_was_taken_ends_although_others_continue(
    manager: Managers, folder: Path, logged: list[str]
) -> None:
    folder.mkdir()
    lock = run_lock.acquire(folder, print)
    options = CheckpointConfig(save=str(folder), on_save_error="continue")
    saver = Saver(options, manager(lock=lock).saving, FakeEngine())
    saver.save(state_at(4), lambda: None, final=False)
    (folder / run_lock.LOCK).write_text("of another run")
    with pytest.raises(SaveError, match=r"\[save-folder-lost\]"):
        saver.save(state_at(8), lambda: None, final=False)
    lock.release()


@pytest.mark.parametrize("on_save_error", ["continue", "exit"])
def test_a_failure_surfaces_at_the_next_step(
    on_save_error: str,
    checkpoints: CheckpointManager,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = CheckpointConfig(save=str(folder), async_save=True, on_save_error=on_save_error)
    saver = Saver(options, checkpoints.saving, FakeEngine())
    with monkeypatch.context() as patch:
        fail_at(1, DISK_FULL, patch, folder)
        saver.save(state_at(4), lambda: None, final=False)
        for _ in range(10_000):
            try:
                saver.advance()
            except SaveError:
                assert on_save_error == "exit"
                break
            if checkpoints.saving._current is None:
                assert on_save_error == "continue"
                assert "[save-skipped]" in capsys.readouterr().out
                break
            time.sleep(0.001)
        else:
            pytest.fail("the failure does not surface")
    saver.save(state_at(8), lambda: None, final=False)
    saver.finish(final=True)
    assert names_in(folder) == {"global_step8", *local_files.POINTERS}


def test_the_failure_of_a_runs_last_save_is_an_error(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CheckpointConfig(save=str(folder), async_save=True)
    saver = Saver(options, checkpoints.saving, FakeEngine())
    fail_at(1, DISK_FULL, monkeypatch, folder)
    saver.save(state_at(4), lambda: None, final=False)
    with pytest.raises(SaveError):
        saver.finish(final=True)


def test_an_abandoned_save_ends_and_stays_incomplete(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread writes into a folder that is no longer owned."""
    save(checkpoints, 4)
    monkeypatch.setattr(checkpoint_io, "CHUNK", 8)
    begun = threading.Event()
    write = checkpoint_io._HashingFile.write

    def write_slowly(file: Any, data: bytes) -> int:
        begun.set()
        time.sleep(0.01)
        return write(file, data)

    monkeypatch.setattr(checkpoint_io._HashingFile, "write", write_slowly)
    engine = FakeEngine()
    engine.snapshot = lambda *, copy: DeepSpeedSnapshot({"a.pt": [0] * 100_000})
    begin(checkpoints, 8, engine)
    advance_until(checkpoints, begun.is_set)
    current = checkpoints.saving._current
    checkpoints.saving.abandon()
    error = current._own.result().error
    assert isinstance(error, OSError)
    assert error.errno == errno.ECANCELED
    assert not [each for each in threading.enumerate() if each.name == "checkpoint"]
    assert incomplete(folder, 8)
    assert [path.name for path in list_checkpoints(folder)] == ["global_step4"]


def test_other_errors_of_the_thread_are_raised(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeSnapshot, "write", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        save(checkpoints, 4, in_background=True)


def test_minutes_count_from_the_last_save(
    manager: Managers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(saving.time, "monotonic", lambda: now[0])
    checkpoints = manager()
    options = CheckpointConfig(save=str(folder), save_interval=100, save_interval_minutes=2.5)
    saver = Saver(options, checkpoints.saving, FakeEngine())
    now[0] += 149
    assert not saver.is_due(7)
    assert saver.is_due(200)
    now[0] += 1
    assert saver.is_due(7)
    save(checkpoints, 7)
    assert not saver.is_due(8)
    now[0] += 150
    assert saver.is_due(9)
