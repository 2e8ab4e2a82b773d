"""End-to-end runs with intra-document attention."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import Launcher, Settings, evaluations, losses, steps


def test_intra_document_attention_is_logged_and_resumed(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "train_iters": 4, "eval_iters": 1, "eval_interval": 4}
    packed = {**settings, "reset_position_ids": True, "reset_attention_mask": True}
    plain, full, parts = (tmp_path / name for name in ("plain", "full", "parts"))
    launcher.start({**settings, "save": plain}, ranks=2).succeed()

    output = launcher.start({**packed, "save": full}, ranks=2).succeed()
    launcher.start({**packed, "exit_interval": 2, "save": parts}, ranks=2).succeed()
    launcher.start({**packed, "save": parts, "load": parts}, ranks=2).succeed()

    assert "document by document" in output
    assert "positions restart" in output
    assert "scaled_dot_product_attention per document" in output
    assert losses(full)[0] != losses(plain)[0]
    assert steps(parts) == steps(full)
    assert evaluations(parts)[-2:] == evaluations(full)[-2:]
