"""Fragments of mutants fit code whatever its formatting and names."""

from __future__ import annotations

import pytest

from tests.mutants.fragments import MisfitError, replace
from tests.mutants.run import REPOSITORY, fit, read_mutants

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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("scaled / max(1, count)", "(\n    scaled\n    / max(1, count)  # a mean\n)"),
        ("scaled", "sum_of_losses"),
        ("count", "number"),
        ("def mean", "@cache\n    def mean"),
        ("class Loss:", "class Loss(Base):"),
        ("\nclass", "\ndef mean(scaled, count):\n    return scaled / max(1, count)\n\nclass"),
    ],
)
def test_formatting_and_names_of_locals_do_not_matter(before: str, after: str) -> None:
    source = SOURCE.replace(before, after)
    assert mutated(source, *MEAN).count(" / (1 + ") == 1


def test_the_module_does_not_matter() -> None:
    other = "def mean(): ...\n"
    for path in ("losses.py", "model/loss/means.py"):
        assert replace({"other.py": other, path: SOURCE}, *MEAN)[0] == path


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("if $COUNT == 0:\n    ...", "if False:\n    ...", "if False:\n            return None"),
        ("$SCALED = self.scale($TOTAL, unit='token')", "$SCALED = $TOTAL", "scaled = total"),
        ("if $COUNT == 0:\n    ...\n$X = $Y", "$X = $Y", "count):\n        scaled = self.scale("),
        ("$ANY.scale", "self.scale_twice", "self.scale_twice(total"),
        ("$SCALED / $COUNT.$MAX(1)", "$COUNT.$MAX / 2", "return count.max / 2"),
    ],
)
def test_fragments_are_expressions_or_statements(old: str, new: str, expected: str) -> None:
    source = SOURCE.replace("max(1, count)", "count.max(1)")
    assert expected in mutated(source, "Loss.mean", old, new)


@pytest.mark.parametrize(
    ("target", "old", "reason"),
    [
        ("Loss.median", "$COUNT", "no Loss.median"),
        ("Loss.mean", "min(1, $COUNT)", "0 such places"),
        ("Loss.mean", "$COUNT / max(1, $COUNT)", "0 such places"),
        ("Loss.mean", "count", "2 such places"),
        ("Loss.mean", "max(1, count)", "only the new fragment has .TOTAL"),
    ],
)
def test_a_fragment_must_fit_once(target: str, old: str, reason: str) -> None:
    with pytest.raises(MisfitError, match=reason):
        mutated(SOURCE, target, old, "$TOTAL + 1")


def test_constants_are_targets() -> None:
    assert mutated("LIMIT: int = 2 * 3\n", "LIMIT", "2 * 3", "7") == "LIMIT: int = 7"


def test_the_mutants_fit_the_package() -> None:
    mutations = fit(read_mutants(), REPOSITORY / "megatron_ds")
    assert len(mutations) > 100
    assert [each.mutant.target for each in mutations if not each.file] == []
