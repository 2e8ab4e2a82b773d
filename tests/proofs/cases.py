"""Cases of a test of which `make test` runs some and `make proofs` all."""

from __future__ import annotations

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
