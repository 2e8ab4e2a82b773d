"""The leader of a server without followers."""

from __future__ import annotations

import threading

import pytest

from megatron_ds.inference.tp_group import ShouldContinue, TpWorkerGroup


def test_a_job_returns_raises_or_is_cancelled(one_process: None) -> None:
    def run(job: str, should_continue: ShouldContinue) -> str:
        return f"{len(job) // len(job)} {should_continue()}"

    group = TpWorkerGroup[str, str](run)
    cancelled = threading.Event()
    assert group.run_as_leader("job", cancelled) == "1 True"
    with pytest.raises(ZeroDivisionError):
        group.run_as_leader("", cancelled)
    cancelled.set()
    assert group.run_as_leader("job", cancelled) == "1 False"
    group.shutdown_followers()
