"""One process at a time, and words for those who wait."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.fileio import file_lock
from megatron_ds.fileio.file_lock import WaitPolicy, is_at, lock_now, locked

QUIET = WaitPolicy(say=lambda text: None)


def test_one_at_a_time_and_words_for_the_next(tmp_path: Path) -> None:
    path, held = tmp_path / "x.lock", threading.Event()
    said: list[str] = []

    def wait() -> None:
        with locked(path, WaitPolicy(say=said.append, words_after=0.0)) as alone:
            assert alone
            held.set()

    thread = threading.Thread(target=wait)
    with locked(path, QUIET):
        thread.start()
        while not said:
            time.sleep(0.01)
        assert not held.is_set()
    thread.join()
    assert held.is_set()
    (text,) = said
    assert f"process {os.getpid()} on " in text
    assert str(path) in text


def test_a_wait_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "x.lock", QUIET),
        pytest.raises(ValueError, match=r"gave up after .* s: process .*x\.lock; if it hangs"),
        locked(tmp_path / "x.lock", WaitPolicy(say=print, limit=0.0)),
    ):
        pass


def test_of_many_that_wait_one_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "x.lock", threading.Semaphore(0)
    speakers: list[int] = []
    first_to_speak = file_lock._WaitReporter._first_to_speak

    def counted(self: Any) -> bool:
        speaks = first_to_speak(self)
        asked.release()
        return speaks

    monkeypatch.setattr(file_lock._WaitReporter, "_first_to_speak", counted)

    def wait() -> None:
        def say(text: str) -> None:
            speakers.append(threading.get_ident())

        with locked(path, WaitPolicy(say, words_after=0.0, words_every=0.0)):
            pass

    threads = [threading.Thread(target=wait) for _ in range(4)]
    with locked(path, QUIET):
        for thread in threads:
            thread.start()
        for _ in threads:
            asked.acquire()
    for thread in threads:
        thread.join()
    assert len(set(speakers)) == 1


def test_a_lock_whose_file_was_deleted_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    said: list[str] = []

    def wait() -> None:
        with locked(path, WaitPolicy(say=said.append, words_after=0.0)), open(path, "ab") as other:
            assert lock_now(other) is False, "the lock that is held is not that of the path"

    with locked(path, QUIET) as alone:
        assert alone
        errors: list[BaseException] = []

        def run() -> None:
            try:
                wait()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while not said:
            time.sleep(0.01)
        path.unlink()
    thread.join()
    assert not errors


def test_files_that_were_renamed_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with open(path, "ab") as file:
        assert is_at(file, path)
        path.rename(tmp_path / "y")
        assert not is_at(file, path)
        path.touch()
        assert not is_at(file, path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_nobody_is_kept_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def flock(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path / "x", QUIET) as alone, locked(tmp_path / "x", QUIET) as other:
        assert (alone, other) == (False, False)


def test_other_errors_come_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*arguments: Any) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="broken"), locked(tmp_path / "x", QUIET):
        pass
