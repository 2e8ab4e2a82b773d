"""The link of a server without followers."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest

from megatron_ds.inference.generation import tp_group
from megatron_ds.inference.generation.tp_group import TpLink


def test_one_process_communicates_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    communication = MagicMock()
    communication.get_world_size.return_value = 1
    communication.get_rank.return_value = 0
    monkeypatch.setattr(tp_group, "dist", communication)

    link = TpLink[str]()

    assert link.is_leader
    assert link.exchange(["start"], ZeroDivisionError()) == ["start"]
    assert {call[0] for call in communication.method_calls} == {"get_world_size", "get_rank"}
