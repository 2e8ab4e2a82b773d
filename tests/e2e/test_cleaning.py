"""Cleanings that are killed, with SIGKILL, again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ds.cleaning.pipeline import clean
from tests.cleaning_runs import corpus, everything, files, killed_at


def test_a_run_that_is_killed_anywhere_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """Killed before each rename and at every fourth flush, and then again on its way."""
    corpus(tmp_path)
    clean(everything(tmp_path))
    wanted = files(tmp_path)
    kills = 0
    for name, numbers in (("replace", range(1, 100)), ("fsync", range(1, 1000, 4))):
        for number in numbers:
            for path in tmp_path.iterdir():
                if path.name != "in.jsonl":
                    path.unlink()
            if not killed_at(number, name, lambda: clean(everything(tmp_path))):
                break
            kills += 1
            killed_at(2, "replace", lambda: clean(everything(tmp_path, resume=True)))
            clean(everything(tmp_path, resume=True))
            assert files(tmp_path) == wanted
        else:
            pytest.fail(f"the run called os.{name} more often than it was tried")
    assert kills >= 10
