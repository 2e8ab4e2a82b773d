"""The list of mutants: it fits the code, and reaches every folder of the package."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.run import Mutant, read_mutants

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "megatron_ds"
MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.change}")
def test_mutants_fit_the_code(mutant: Mutant) -> None:
    source = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, "adapt `old` and `new` to the changed file"
    ast.parse(source.replace(mutant.old, mutant.new))
    assert mutant.old != mutant.new
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (REPOSITORY / path).exists(), path
        function = name.partition("[")[0]
        assert f"def {function}(" in (REPOSITORY / path).read_text() if name else True, test


def test_mutants_reach_every_folder() -> None:
    assert len(MUTANTS) == len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS})
    assert len(MUTANTS) >= 100
    folders = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
    assert folders <= {mutant.file.partition("/")[0] for mutant in MUTANTS}


SOURCE = "def larger(a, b):\n    return a if a > b else b\n"
TEST = "from megatron_ds.numbers import larger\ndef test(): assert larger(1, 2) == 2\n"


def test_outcomes_of_mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caught, a surviving and a broken mutant in a repository of one function."""
    for name, text in (("megatron_ds/numbers.py", SOURCE), ("tests/test_larger.py", TEST)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)

    def outcome(new: str) -> tuple[str, str]:
        mutant = Mutant("numbers.py", "", "a > b", new, ("tests/test_larger.py",))
        with run.applied(mutant, tmp_path):
            return run.run_tests(tmp_path, list(mutant.tests))

    assert outcome("a < b") == ("caught", "tests/test_larger.py::test")
    assert outcome("a >= b") == ("survived", "")
    assert outcome("a >>> b")[0] == "broken"
    assert (tmp_path / "megatron_ds/numbers.py").read_text() == SOURCE
    copy = run.copy_repository(tmp_path / "copy")
    assert (copy / "tests/test_larger.py").read_text() == TEST


def test_help_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, run.__file__, "--help"], capture_output=True, text=True, check=True
    )
    assert "patterns" in done.stdout
