"""Cases of a test of which `make test` runs some and `make proofs` all."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_proofs(cases: Iterable[Any], proofs: Collection[Any]) -> list[Any]:
    """The cases as parameters, those of `proofs` with the marker. A tuple has several arguments."""
    cases = list(cases)
    assert all(proof in cases for proof in proofs)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.proof] if case in proofs else [],
        )
        for case in cases
    ]


Cases = list[tuple[Any, ...]]


def rotated(*axes: Iterable[Any]) -> tuple[Cases, Cases]:
    """The combinations of some axes, and those of them that are proofs.

    `make test` has each combination of all axes but the last one, whose values take turns.
    """
    values = [list(axis) for axis in axes]
    cases = list(itertools.product(*values))
    places = itertools.product(*map(range, map(len, values)))
    turns = [last == sum(others) % len(values[-1]) for *others, last in places]
    return cases, [case for case, is_turn in zip(cases, turns, strict=True) if not is_turn]
