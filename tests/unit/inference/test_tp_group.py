"""The leader of a server without followers."""

from __future__ import annotations

import threading
from unittest.mock import MagicMock

import pytest

from megatron_ds.inference import tp_group
from megatron_ds.inference.tp_group import ShouldContinue, TpWorkerGroup


def test_one_process_communicates_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    communication = MagicMock()
    communication.get_world_size.return_value = 1
    monkeypatch.setattr(tp_group, "dist", communication)

    def run(job: str, should_continue: ShouldContinue) -> str:
        if job == "divide":
            raise ZeroDivisionError
        return f"{job} {should_continue()}"

    group = TpWorkerGroup[str, str](run)
    cancelled = threading.Event()
    assert group.run_as_leader("job", cancelled) == "job True"
    with pytest.raises(ZeroDivisionError):
        group.run_as_leader("divide", cancelled)
    cancelled.set()
    assert group.run_as_leader("job", cancelled) == "job False"
    group.shutdown_followers()
    assert [call[0] for call in communication.method_calls] == ["get_world_size"]
