"""What the tools that load a checkpoint share."""

from __future__ import annotations

from megatron_ds.inference.cli import broadcast_from_rank0


def test_one_process_sends_nothing() -> None:
    assert broadcast_from_rank0("prompt") == "prompt"  # there is no process group
