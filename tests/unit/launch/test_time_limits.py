"""Waits of a process that is about to end, for what may never answer."""

from __future__ import annotations

import threading

import pytest

from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process import lifecycle, time_limits
from megatron_ds.launch.process.lifecycle import ProcessLifecycle
from megatron_ds.launch.ranks import roll_call
from megatron_ds.launch.ranks.roll_call import RollCall


@pytest.fixture
def answered() -> threading.Event:
    """Never."""
    return threading.Event()


def test_a_reader_that_stalls_delays_the_end_by_seconds(
    answered: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "OUTPUT_S", 0.05)
    time_limits.say(lambda text: answered.wait() and None, "text")
    ended: list[int] = []
    monkeypatch.setattr(time_limits.os, "_exit", ended.append)
    monkeypatch.setattr(time_limits.sys, "stdout", type("Full", (), {"flush": answered.wait}))
    time_limits.end_process(ExitCode.HUNG)
    assert ended == [ExitCode.HUNG]


def test_without_another_thread_a_text_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    said: list[str] = []
    time_limits.say(said.append, "text")
    assert said == ["text"]


def test_a_rank_that_fails_before_the_start_does_not_wait_for_a_silent_store(
    answered: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    for name in ("REPORT_S", "ANSWER_S", "FAILURE_GRACE_S"):
        monkeypatch.setattr(roll_call, name, 0.02)
    monkeypatch.setattr(roll_call, "_connect", lambda timeout_s: answered.wait())
    call = RollCall()
    assert call.report(["it lacks a file"], ExitCode.ERROR) is None
    assert call.is_over


def test_a_check_that_fails_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    life = ProcessLifecycle()
    ended = list[int]()
    monkeypatch.setattr(life, "_check_launchers", lambda: 1 / 0)
    monkeypatch.setattr(lifecycle, "POLL_S", 0.0)
    monkeypatch.setattr(lifecycle, "end_process", ended.append)
    life._monitor()
    assert ended == [ExitCode.ERROR]
    assert "ZeroDivisionError" in capsys.readouterr().err
