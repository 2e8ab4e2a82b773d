"""Runs that heed documents' bounds, as a user starts them."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.runs import Launcher, Settings, evaluations, losses, steps


def test_bounds_are_heeded_told_and_kept_on_resume(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "train_iters": 4, "eval_iters": 1, "eval_interval": 4}
    heeded = {**settings, "reset_position_ids": True, "reset_attention_mask": True}
    plain, whole, parts = (tmp_path / name for name in ("plain", "whole", "parts"))
    launcher.start({**settings, "save": plain}, ranks=2).succeed()

    output = launcher.start({**heeded, "save": whole}, ranks=2).succeed()
    launcher.start({**heeded, "exit_interval": 2, "save": parts}, ranks=2).succeed()
    launcher.start({**heeded, "save": parts, "load": parts}, ranks=2).succeed()

    assert "attention runs document by document: flex_attention knows no --attention-" in output
    assert "documents  positions restart, attention stays within" in output
    assert "scaled_dot_product_attention per document" in output
    assert losses(whole)[0] != losses(plain)[0]
    assert steps(parts) == steps(whole)
    assert evaluations(parts)[-2:] == evaluations(whole)[-2:]
