"""Which rank has other weights than its replicas, of any number of ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_ds.engine.states import replicas
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.sharding import mark_experts, mark_sharded
from megatron_ds.parallel.weights import ShardSpec


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


@pytest.mark.parametrize(
    ("mark", "size"),
    [
        ("sharded", 2),
        ("expert", 2),
        ("tied", 8),
        ("", 4),
    ],
)
def test_copies_of_all_ranks_are_compared(mark: str, size: int) -> None:
    """Eight ranks: two pipeline stages, two data-parallel and two tensor-parallel ranks, of which
    the data-parallel ones have different experts."""
    parameter = nn.Parameter(torch.ones(2))
    if mark == "sharded":
        mark_sharded(parameter, ShardSpec(0, (4,)))
    if mark == "expert":
        mark_experts(parameter, 2)
    tied = [parameter] * (mark == "tied")
    keys = set()
    for pp, dp, tp in itertools.product(range(2), repeat=3):
        ranks = {
            axis: Group((0, 1), rank, None) for axis, rank in {"pp": pp, "ep": dp, "tp": tp}.items()
        }
        mesh = dataclasses.replace(Mesh.single(), **ranks)

        def gather(value: Any) -> list[Any]:
            ((copies, _),) = value
            keys.add(copies)
            return [value]

        with mock.patch.object(replicas, "gather_objects", gather):
            replicas.find_different_weights([("weight", parameter)], mesh, tied)
    assert 8 // len(keys) == size
