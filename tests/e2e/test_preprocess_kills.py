"""Preprocessing that is killed at each step that makes files durable or gives them names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_ds.preprocess import output_files
from tests.e2e.interrupted import KINDS, check_kills


@pytest.mark.parametrize("name", KINDS)
def test_killed_at_every_second_step_it_ends_as_if_undisturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(output_files, "RECORD_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # no power fails here
    assert check_kills(tmp_path, name, every=2) > 12
