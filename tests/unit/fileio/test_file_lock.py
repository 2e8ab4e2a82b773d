"""Inter-process file lock and the messages of waiting processes."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_ds.fileio import file_lock
from megatron_ds.fileio.file_lock import WaitPolicy, is_at, lock_now, locked
from tests.problems import raises_problem

QUIET = WaitPolicy(report=lambda text: None)


def test_lock_is_exclusive_and_a_wait_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    messages = list[str]()

    def wait() -> bool:
        with locked(path, WaitPolicy(report=messages.append, report_after=0.0)) as is_locked:
            return is_locked

    with ThreadPoolExecutor(1) as pool:
        with locked(path, QUIET):
            waiting = pool.submit(wait)
            while not messages:
                time.sleep(0.01)
            assert not waiting.done()
        assert waiting.result()
    (text,) = messages
    assert f"process {os.getpid()} on " in text
    assert str(path) in text


def test_too_long_wait_is_an_error(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "x.lock", QUIET),
        raises_problem("lock-wait-timeout", contains="x.lock"),
        locked(tmp_path / "x.lock", WaitPolicy(report=print, timeout=0.0)),
    ):
        pass


def test_one_of_several_waiting_threads_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.lock"
    asked = threading.Semaphore(0)
    reporters: list[int] = []
    is_first_waiter = file_lock._is_first_waiter

    def counted(*arguments: Any) -> bool:
        reports = is_first_waiter(*arguments)
        asked.release()
        return reports

    monkeypatch.setattr(file_lock, "_is_first_waiter", counted)

    def wait() -> None:
        def report(text: str) -> None:
            reporters.append(threading.get_ident())

        with locked(path, WaitPolicy(report, report_after=0.0, report_every=0.0)):
            pass

    with ThreadPoolExecutor(4) as pool, locked(path, QUIET):
        waiting = [pool.submit(wait) for _ in range(4)]
        for _ in waiting:
            asked.acquire()
    assert [each.result() for each in waiting] == [None] * 4
    assert len(set(reporters)) == 1


def test_lock_of_a_deleted_file_is_acquired_again(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    messages = list[str]()

    def wait() -> bool | None:
        policy = WaitPolicy(report=messages.append, report_after=0.0)
        with locked(path, policy), open(path, "ab") as other:
            return lock_now(other)

    with ThreadPoolExecutor(1) as pool, locked(path, QUIET) as is_locked:
        assert is_locked
        waiting = pool.submit(wait)
        while not messages:
            time.sleep(0.01)
        path.unlink()
    assert waiting.result() is False, "the lock that is held is not that of the path"


def test_is_at_detects_renamed_and_replaced_files(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with open(path, "ab") as file:
        assert is_at(file, path)
        path.rename(tmp_path / "y")
        assert not is_at(file, path)
        path.touch()
        assert not is_at(file, path)


def test_file_systems_without_locks_grant_no_lock_and_other_errors_propagate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for code in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(code, "no locks")))
        with locked(tmp_path / "x", QUIET) as is_locked, locked(tmp_path / "x", QUIET) as other:
            assert (is_locked, other) == (False, False)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"), locked(tmp_path / "x", QUIET):
        pass
