"""The program that scores the tests by mutants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.run import Mutant

LARGER = "def larger(a, b):\n    return a if a > b else b\n"
TEST = "from megatron_ds.numbers import larger\ndef test(): assert larger(1, 2) == 2\n"


def test_outcomes_of_mutants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A caught, a surviving and two broken mutants in a repository of one function."""
    for name, text in (("megatron_ds/numbers.py", LARGER), ("tests/test_larger.py", TEST)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    entries = [("$A > $B", "$A < $B"), ("$A > $B", "$A >= $B"), ("$A + $B", "$A"), ("$A > $B", ">")]
    mutants = [Mutant("larger", new, old, new, "tests/test_larger.py") for old, new in entries]
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    monkeypatch.setattr(run, "read_mutants", lambda: mutants)

    def score(*options: str) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["run.py", "--jobs", "1", *options])
        status = run.main()
        return status, [line.split()[0] for line in capsys.readouterr().out.splitlines()]

    assert score("--fit") == (1, ["broken", "broken"])
    assert score() == (1, ["broken", "broken", "caught", "survived", "1"])
    assert score("--fit", "numbers.*") == (0, [])
    assert (tmp_path / "megatron_ds/numbers.py").read_text() == LARGER


def test_help_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, run.__file__, "--help"], capture_output=True, text=True, check=True
    )
    assert "patterns" in done.stdout
