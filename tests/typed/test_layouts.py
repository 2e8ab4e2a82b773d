"""The types of all tensors of a forward and a backward pass, at sizes that no test can run.

A process is one rank of torch's fake process group: it computes with small tensors, and what it
would receive is filled in. Types do not depend on values, so every size costs the same.
"""

from __future__ import annotations

import pytest

pytest.importorskip("spmd_types", reason="needs spmd_types")

from tests.dist.layouts import covering, name_of
from tests.tables import UniqueNames
from tests.typed import cases

RUNS = UniqueNames((name_of(run), run) for run in covering())


@pytest.mark.proof
@pytest.mark.parametrize(("world", "size"), cases.WORLDS)
@pytest.mark.parametrize("name", RUNS)
def test_a_layout_has_the_declared_types(name: str, world: int, size: int) -> None:
    """Claim (parallel): In every layout of the covering array, on 8, 1,024 and 4,096 ranks, all
    tensors of a forward and a backward pass lie on the ranks as declared, and every parameter's
    gradient is complete but for what the engine sums."""
    cases.check(RUNS[name], world, size)


@pytest.mark.proof
@pytest.mark.parametrize(("world", "size"), cases.WORLDS)
@pytest.mark.parametrize("name", cases.FURTHER)
def test_further_parts_have_the_declared_types(name: str, world: int, size: int) -> None:
    """Claim (parallel): The tensors of latent attention, attention sinks, gates, norms of heads,
    multi-token prediction, and experts that are shared, latent, or whole on tensor-parallel ranks
    lie on the ranks as declared, with tensor and sequence parallelism, DeepSpeed-Ulysses and
    stages, on 8, 1,024 and 4,096 ranks."""
    run, changes = cases.FURTHER[name]
    cases.check(run, world, size, **changes)
