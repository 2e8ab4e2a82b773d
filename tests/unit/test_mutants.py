"""Fragments of mutants fit code whatever its formatting and names."""

from __future__ import annotations

import pytest

from tests.mutants.fragments import MisfitError, replace
from tests.mutants.run import REPOSITORY, fit, read_mutants
from tests.tables import tables

TABLES = tables(__file__)

SOURCE = """
class Loss:
    def mean(self, total, count):
        if count == 0:
            return None  # nothing is counted
        scaled = self.scale(total, unit="token")
        return scaled / max(1, count)
"""
MEAN = ("Loss.mean", "$SCALED / max(1, $COUNT)", "$SCALED / (1 + $COUNT)")


def mutated(source: str, target: str, old: str, new: str) -> str:
    return replace({"losses.py": source}, target, old, new)[1]


@pytest.mark.parametrize(("before", "after"), TABLES["equal_forms"])
def test_formatting_and_names_of_locals_do_not_matter(before: str, after: str) -> None:
    source = SOURCE.replace(before, after)
    assert mutated(source, *MEAN).count(" / (1 + ") == 1


def test_the_module_does_not_matter() -> None:
    other = "def mean(): ...\n"
    for path in ("losses.py", "model/loss/means.py"):
        assert replace({"other.py": other, path: SOURCE}, *MEAN)[0] == path


@pytest.mark.parametrize(("old", "new", "expected"), TABLES["fragments"])
def test_fragments_are_expressions_or_statements(old: str, new: str, expected: str) -> None:
    source = SOURCE.replace("max(1, count)", "count.max(1)")
    assert expected in mutated(source, "Loss.mean", old, new)


@pytest.mark.parametrize(("target", "old", "reason"), TABLES["wrong_fragments"])
def test_a_fragment_must_fit_once(target: str, old: str, reason: str) -> None:
    with pytest.raises(MisfitError, match=reason):
        mutated(SOURCE, target, old, "$TOTAL + 1")


def test_constants_are_targets() -> None:
    assert mutated("LIMIT: int = 2 * 3\n", "LIMIT", "2 * 3", "7") == "LIMIT: int = 7"


def test_the_mutants_fit_the_package() -> None:
    mutations = fit(read_mutants(), REPOSITORY / "megatron_ds")
    assert len(mutations) > 100
    assert [each.mutant.target for each in mutations if not each.file] == []
