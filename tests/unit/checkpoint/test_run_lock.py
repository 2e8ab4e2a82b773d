"""One run at a time owns a --save folder; the lock of a dead one is taken over.

Claim (checkpoints): one run at a time owns a `--save` folder; a killed run's is taken over at once
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.folders import run_lock
from megatron_ds.checkpoint.folders.run_lock import LOCK, Owner, acquire
from megatron_ds.checkpoint.save_steps import SaveError
from megatron_ds.fileio.atomic import FileRecord
from tests.problems import raises_problem
from tests.unit.checkpoint.fakes import (
    FakeEngine,
    FakeSnapshot,
    Managers,
    load,
    names_in,
    save,
    state_at,
)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDING_S", 0.6), ("FOREIGN_SILENCE_S", 0.6), ("HEARTBEAT_S", 0.1)):
        monkeypatch.setattr(run_lock, name, value)
    monkeypatch.setattr(run_lock, "POLL_S", 0.01)


@contextmanager
def another_run(folder: Path) -> Iterator[int]:
    """The pid of a process that owns the folder, until it is killed."""
    child = os.fork()
    if child == 0:
        acquire(folder, lambda line: None)
        time.sleep(60.0)
        os._exit(0)
    end = time.monotonic() + 10
    lock = folder / LOCK
    while not (lock.exists() and lock.read_bytes()) and time.monotonic() < end:
        time.sleep(0.01)
    yield child
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def write_owner(folder: Path, **changes: object) -> None:
    owner = dataclasses.replace(Owner.here(), **changes)
    (folder / LOCK).write_text(json.dumps(asdict(owner)))


def test_a_live_owner_is_named(tmp_path: Path, logged: list[str]) -> None:
    with another_run(tmp_path) as pid:
        content = (tmp_path / LOCK).read_bytes()
        named = f"process {pid} on {os.uname().nodename}, since 20"
        with raises_problem("save-folder-in-use", "save", contains=named):
            acquire(tmp_path, logged.append)
        assert (tmp_path / LOCK).read_bytes() == content
    assert len(logged) == 1


def test_a_copy_of_the_folder_of_a_live_run_is_free(tmp_path: Path, logged: list[str]) -> None:
    """Claim (checkpoints): a copy of the `--save` folder of a live run can be used; renamed and
    linked it still belongs to the run"""
    with another_run(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        lock = acquire(tmp_path / "copy", logged.append)
        assert lock.is_held()
        assert not logged
        lock.release()


def test_a_renamed_a_linked_and_a_recreated_folder_are_those_of_the_live_run(
    tmp_path: Path, logged: list[str]
) -> None:
    """Claim (checkpoints): a copy of the `--save` folder of a live run can be used; renamed and
    linked it still belongs to the run"""
    with another_run(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "renamed")
        (tmp_path / "link").symlink_to("renamed")
        shutil.copytree(tmp_path / "renamed", tmp_path / "run")  # to which the run will save
        for name in ("renamed", "link", "run"):
            with raises_problem("save-folder-in-use"):
                acquire(tmp_path / name, logged.append)


def test_a_killed_owners_lock_is_taken_at_once(tmp_path: Path, logged: list[str]) -> None:
    with another_run(tmp_path) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        lock = acquire(tmp_path, logged.append)
    assert not logged
    assert lock.is_held()
    assert names_in(tmp_path) == {LOCK}
    lock.release()
    assert names_in(tmp_path) == set()
    assert not lock.is_held()  # as in a thread that outlives the run
    assert names_in(tmp_path) == set()


def test_an_owner_that_is_about_to_end_is_awaited(tmp_path: Path, logged: list[str]) -> None:
    with another_run(tmp_path) as pid:

        def end_it(line: str) -> None:
            logged.append(line)
            os.kill(pid, signal.SIGKILL)

        acquire(tmp_path, end_it).release()
    assert len(logged) == 1


@pytest.mark.parametrize("is_here", [True, False], ids=["this host", "another host"])
def test_a_lock_that_is_released_during_the_wait_is_free(
    is_here: bool, tmp_path: Path, logged: list[str]
) -> None:
    """Its process may live on."""
    write_owner(tmp_path, **({} if is_here else {"location": "elsewhere 1 2"}))
    touch = threading.Timer(0.05, os.utime, [tmp_path / LOCK])
    touch.start()
    release = threading.Timer(0.2, (tmp_path / LOCK).unlink)
    release.start()
    lock = acquire(tmp_path, logged.append)
    release.join()
    assert lock.is_held()
    lock.release()


def test_a_lock_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            acquire(tmp_path, print)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == set()


def test_a_process_that_reuses_the_pid_is_not_the_owner(tmp_path: Path, logged: list[str]) -> None:
    write_owner(tmp_path, started="1")
    acquire(tmp_path, logged.append).release()
    assert not logged


@pytest.mark.parametrize("content", [None, b"", b"{"], ids=["another host", "empty", "partial"])
def test_an_owner_that_cannot_be_checked_is_dead_once_it_is_silent(
    content: bytes | None, tmp_path: Path, logged: list[str]
) -> None:
    if content is None:
        write_owner(tmp_path, host="elsewhere", location="elsewhere 1 2")
    else:
        (tmp_path / LOCK).write_bytes(content)
    start = time.monotonic()
    acquire(tmp_path, logged.append).release()
    assert time.monotonic() - start >= run_lock.FOREIGN_SILENCE_S
    assert len(logged) == 1


@pytest.mark.parametrize(("run", "waits"), [("run", 0), ("another", 1), ("none", 1)])
def test_the_lock_of_a_run_that_torchrun_starts_again_is_taken_sooner(
    run: str, waits: int, tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node was lost. `none` is the id of all runs without a rendezvous."""
    monkeypatch.setattr(run_lock, "ELASTIC_SILENCE_S", 0.2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    write_owner(tmp_path, location="elsewhere 1 2", run="" if run == "none" else "run")
    acquire(tmp_path, logged.append).release()
    assert [line.startswith(f"waiting up to {waits} s for") for line in logged] == [True]


def test_an_owner_on_another_host_lives_while_it_touches_its_file(
    tmp_path: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clocks of the hosts differ by a day."""
    here = Owner.here()
    elsewhere = dataclasses.replace(here, host="elsewhere", location="elsewhere 1 2")
    with monkeypatch.context() as patch:
        patch.setattr(Owner, "here", lambda: elsewhere)
        lock = acquire(tmp_path, logged.append)
    utime = os.utime
    yesterday = time.time_ns() - 86_400 * 10**9
    monkeypatch.setattr(
        os, "utime", lambda path: utime(path, ns=(0, yesterday + time.monotonic_ns() % 10**9))
    )
    with raises_problem("save-folder-in-use", contains="on elsewhere, since"):
        acquire(tmp_path, logged.append)
    assert lock.is_held()
    lock.release()


def test_one_of_several_runs_takes_a_dead_owners_lock(tmp_path: Path, logged: list[str]) -> None:
    write_owner(tmp_path, started="1")
    taken: list[run_lock.RunLock] = []
    refused: list[Exception] = []

    def take() -> None:
        try:
            taken.append(acquire(tmp_path, logged.append))
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(taken) + len(refused) == 8
    assert [lock.is_held() for lock in taken].count(True) == 1
    for lock in taken:
        lock.release()


def test_a_lock_that_was_taken_meanwhile_is_not_removed(tmp_path: Path) -> None:
    write_owner(tmp_path)
    content = (tmp_path / LOCK).read_bytes()
    run_lock.FolderLockFile(tmp_path / LOCK).remove(b"the owner that was dead")
    assert (tmp_path / LOCK).read_bytes() == content
    assert names_in(tmp_path) == {LOCK}


def test_a_run_that_lost_its_folder_leaves_it_to_the_new_owner(
    manager: Managers, folder: Path, lock: run_lock.RunLock
) -> None:
    checkpoints = manager(lock=lock)
    save(checkpoints, 2)
    (folder / LOCK).unlink()  # by a user who tidies up
    save(checkpoints, 4)
    (folder / LOCK).write_text("of another run")
    incomplete = folder / ".incomplete-global_step9"
    incomplete.mkdir()
    with pytest.raises(SaveError, match=r"\[save-folder-lost\]"):
        save(checkpoints, 6)
    assert incomplete.exists()
    lock.release()
    assert (folder / LOCK).read_text() == "of another run"


def test_a_heartbeat_while_a_save_creates_the_deleted_file_again_loses_nothing(
    tmp_path: Path,
) -> None:
    class SlowFile(run_lock.FolderLockFile):
        """Writes some time after it has created the file, as on a busy file system."""

        def create(self, content: bytes) -> bool:
            if (tmp_path / LOCK).exists():
                return False
            (tmp_path / LOCK).touch()
            time.sleep(0.3)
            (tmp_path / LOCK).write_bytes(content)
            return True

    lock = run_lock.RunLock(SlowFile(tmp_path / LOCK), run_lock.Lease(b"this run", 1000.0, 1000.0))
    held: list[bool] = []
    threads = [threading.Thread(target=lambda: held.append(lock.is_held())) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert held == [True, True]
    lock.release()


def test_a_heartbeat_notices_that_another_run_has_the_folder(tmp_path: Path) -> None:
    lock = acquire(tmp_path, print)
    lost = threading.Event()
    lock.on_lost = lost.set
    (tmp_path / LOCK).unlink()  # by a user who tidies up
    assert lock.is_held()
    assert not lost.wait(3 * run_lock.HEARTBEAT_S)
    (tmp_path / LOCK).write_text("of another run")
    assert lost.wait(30)
    lock.release()


@pytest.mark.parametrize("error", [None, OSError("a disk error")], ids=str)
def test_a_run_that_loses_its_folder_during_a_save_leaves_it_to_the_new_owner(
    manager: Managers,
    folder: Path,
    lock: run_lock.RunLock,
    monkeypatch: pytest.MonkeyPatch,
    error: OSError | None,
) -> None:
    checkpoints = manager(lock=lock)
    incomplete = folder / ".incomplete-global_step9"

    def take_over(snapshot: FakeSnapshot, path: Path) -> object:
        (folder / LOCK).write_text("of another run")
        incomplete.mkdir()
        if error is not None:
            raise error
        return original(snapshot, path)

    original = FakeSnapshot.write
    monkeypatch.setattr(FakeSnapshot, "write", take_over)
    with pytest.raises(SaveError, match=r"\[save-folder-lost\]"):
        save(checkpoints, 2)
    assert not (folder / "global_step2").exists()
    assert incomplete.exists()
    (folder / LOCK).unlink()  # the other run has ended
    with pytest.raises(SaveError, match=r"\[save-folder-lost\]"):
        save(checkpoints, 4)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("due", ["global_step2", "latest", "latest_checkpointed_iteration.txt"])
def test_a_run_that_was_suspended_at_the_end_of_a_save_leaves_the_folder_to_the_new_owner(
    due: str,
    manager: Managers,
    folder: Path,
    lock: run_lock.RunLock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was suspended before a rename to this name, after a look at the lock: the new owner has
    saved the same iteration, and a later one."""
    before: dict[Path, bytes] = {}

    def suspended(path: Path) -> None:
        if path.name == due and not before:
            before[path] = b""
            (folder / LOCK).write_text("of another run")
            for iteration in (2, 4):
                save(manager(), iteration)
            before.clear()
            before.update(contents(folder))

    def suspended_publish(temporary: Path, target: Path) -> None:
        suspended(target)
        publish(temporary, target)

    def suspended_write(path: Path, *arguments: Any) -> FileRecord:
        suspended(path)
        return write(path, *arguments)

    publish = local_files.publish
    write = local_files.write_atomically
    monkeypatch.setattr(local_files, "publish", suspended_publish)
    monkeypatch.setattr(local_files, "write_atomically", suspended_write)
    with pytest.raises(SaveError, match=r"\[save-folder-lost\]"):
        save(manager(lock=lock), 2)
    assert contents(folder) == before
    assert (folder / "latest").read_text() == "global_step4"


def test_a_run_that_was_suspended_in_a_save_writes_no_file_of_the_new_owner(
    manager: Managers,
    folder: Path,
    lock: run_lock.RunLock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are in the save of the same iteration."""
    suspended: list[Path] = []
    write = FakeSnapshot.write
    engine = FakeEngine()

    def write_slowly(snapshot: FakeSnapshot, path: Path) -> dict[str, FileRecord]:
        if not suspended:
            suspended.append(path)
            (folder / LOCK).write_text("of another run")
            engine.content = "of the new owner"
            manager().saving.save(engine, state_at(2))
            return write(snapshot, path)
        written = write(snapshot, path)
        with suppress(OSError):
            (suspended[0] / "model_states.pt").write_bytes(b"of the suspended run")
        return written

    monkeypatch.setattr(FakeSnapshot, "write", write_slowly)
    with pytest.raises(SaveError, match=r"\[save-folder-lost\]"):
        save(manager(lock=lock), 2)
    assert load(manager())[1].content == "of the new owner"
    assert names_in(folder) == {LOCK, "global_step2", *local_files.POINTERS}


class FakeFile:
    """A lock file whose readings are counted."""

    def __init__(self, content: bytes | None) -> None:
        self.content = content
        self.readings = 0

    def read(self) -> bytes | None:
        self.readings += 1
        return self.content

    def create(self, content: bytes) -> bool:
        if self.content is None:
            self.content = content
        return self.content == content

    def touch(self, content: bytes) -> None:
        pass

    touched = None
    remove = None
    folder = None  # not used


@pytest.fixture
def seconds() -> list[float]:
    """The time of a clock that a test sets."""
    return [0.0]


def file_and_ownership(seconds: list[float]) -> tuple[FakeFile, run_lock.Ownership]:
    file = FakeFile(b"mine")
    lease = run_lock.Lease(b"mine", heartbeat_s=10.0, silence_s=60.0)
    return file, run_lock.Ownership(cast("run_lock.LockFile", file), lease, lambda: seconds[0])


def test_records_are_written_without_a_reading_until_another_run_may_have_the_folder(
    seconds: list[float],
) -> None:
    file, ownership = file_and_ownership(seconds)
    for _ in range(100):
        assert ownership.may_write()
    assert not file.readings
    seconds[0] = 25.0
    assert ownership.may_write()
    assert ownership.may_write()
    assert file.readings == 1
    seconds[0] = 90.0
    file.content = b"of another run"
    assert not ownership.may_write()
    file.content = b"mine"  # never again
    assert not ownership.may_write()


@pytest.mark.parametrize(("silence", "expected"), [(30.0, True), (90.0, False)])
def test_a_missing_lock_was_deleted_unless_another_run_may_have_come_and_gone(
    seconds: list[float], silence: float, expected: bool
) -> None:
    file, ownership = file_and_ownership(seconds)
    seconds[0] = silence
    file.content = None
    assert ownership.may_write() == expected
    lease = run_lock.Lease(b"mine", heartbeat_s=3600.0, silence_s=60.0)
    seconds[0] = 0.0
    lock = run_lock.RunLock(cast("run_lock.LockFile", file), lease, lambda: seconds[0])
    seconds[0] = silence
    assert lock.is_held() == expected
    assert file.content == (b"mine" if expected else None)
    lock._released.set()


def test_a_lock_that_cannot_be_read_stops_no_record(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, ownership = file_and_ownership(seconds)
    seconds[0] = 90.0

    def fail() -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file, "read", fail)
    assert ownership.may_write()


def test_a_save_creates_a_deleted_folder_again_and_reports_one_that_cannot_be_created(
    manager: Managers, folder: Path, lock: run_lock.RunLock
) -> None:
    checkpoints = manager(lock=lock)
    shutil.rmtree(folder)
    save(checkpoints, 2)
    assert names_in(folder) >= {LOCK, "global_step2"}
    shutil.rmtree(folder)
    folder.touch()
    with pytest.raises(SaveError, match=r"\[save-failed\]"):
        save(checkpoints, 4)


@pytest.fixture
def lock(folder: Path) -> Iterator[run_lock.RunLock]:
    folder.mkdir()
    lock = acquire(folder, print)
    yield lock
    lock.release()
