"""Reductions that the setup passes to the loop."""

from __future__ import annotations

import torch

from megatron_ds.parallel.mesh import Mesh
from megatron_ds.training.setup import mean_over_group
from tests.distributed import run_ranks


def test_mean_over_group_is_element_wise_and_exact() -> None:
    expected = [1.5, (0.1 + 1.1) / 2]
    assert run_ranks(_mean, 2) == [expected, expected]
    group = Mesh.single().dp
    assert mean_over_group([0.1], group=group, device=torch.device("cpu")) == [0.1]


def _mean(rank: int) -> list[float]:
    mesh = Mesh.build(1)
    return mean_over_group([1.0 + rank, 0.1 + rank], group=mesh.dp, device=torch.device("cpu"))
