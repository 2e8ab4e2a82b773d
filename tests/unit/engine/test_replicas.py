"""Which rank has other weights than its replicas, of any number of ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_ds.engine.states import replicas
from megatron_ds.parallel.mesh import Mesh


def different_weights(model: nn.Module, ranks: list[Any]) -> Any:
    """The result on one rank, whose hash of all parameters is not that of every rank.

    Args:
        model: Model of the rank.
        ranks: What the ranks send about each parameter; the rank's is appended.
    """

    def gather(value: Any) -> list[Any]:
        if isinstance(value, set):
            return [value, {(replicas_, b"") for replicas_, _ in value}]
        ranks.append((f"node{len(ranks)}", value[1]))
        return ranks

    with mock.patch.object(replicas, "gather_objects", gather):
        return replicas.find_different_weights(model.named_parameters(), Mesh.single())


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ([], None),
        ([2], {2: "node2"}),
        ([0, 1], {0: "node0", 1: "node1", 2: "node2"}),  # three values
    ],
)
def test_the_ranks_that_differ_from_most_are_named(
    changed: list[int], expected: dict[int, str] | None
) -> None:
    models = [nn.Sequential(nn.Linear(2, 3).bfloat16(), nn.Linear(3, 2)) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    for rank in changed:
        with torch.no_grad():
            models[rank].get_parameter("1.bias")[0] += 1 + rank
    ranks: list[Any] = []
    results = [different_weights(model, ranks) for model in models]
    assert results[-1] == (None if expected is None else ("1.bias", expected))


def test_equal_hashes_of_all_parameters_suffice() -> None:
    with mock.patch.object(replicas, "gather_objects", lambda value: [value] * 3):
        model = nn.Linear(2, 2)
        assert replicas.find_different_weights(model.named_parameters(), Mesh.single()) is None
