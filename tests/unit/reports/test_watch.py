"""The tool that shows a run in progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ds.reports import watch
from tests.unit.reports.run_files import event, start, steps, write_run

TOOL = watch


def test_the_tool_prints_one_frame_or_ends_with_the_run(run: Any, tmp_path: Path) -> None:
    write_run(tmp_path, steps(range(1, 5)), [start(0)])
    assert "iteration 4 of 8" in run(tmp_path, "--once").out
    write_run(tmp_path, steps(range(1, 5)), [start(0), event("end", 4, status=0)])
    assert "ended with status 0" in run(tmp_path / "metrics.jsonl", "--interval", 60).out


def test_ctrl_c_ends_without_a_message(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        assert seconds == 3
        raise KeyboardInterrupt

    write_run(tmp_path, steps(range(1, 5)), [start(0)])
    monkeypatch.setattr("time.sleep", interrupt)
    assert "interrupted" not in "".join(run(tmp_path, "--interval", 3))


def test_a_missing_folder_is_named(run: Any, tmp_path: Path) -> None:
    assert f"RUN {tmp_path / 'no'}: no such" in run(tmp_path / "no", status=2).err
    assert "RUN is required" in run(status=2).err
