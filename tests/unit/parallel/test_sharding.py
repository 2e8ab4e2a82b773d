"""Sharding and unsharding parameters."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import (
    declared_parameter,
    mark_sharded,
    shard_spec,
    take_shard,
    unshard,
)
from megatron_ds.parallel.weights import ShardSpec, Weight
from tests.problems import raises_problem


def test_each_section_is_sharded_separately() -> None:
    full = torch.arange(8)  # q: 0 1 2 3, k: 4 5, v: 6 7
    spec = ShardSpec(0, (4, 2, 2))
    assert take_shard(full, spec, 0, 2).tolist() == [0, 1, 4, 6]
    assert take_shard(full, spec, 1, 2).tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "spec", [ShardSpec(0, (8, 4, 4)), ShardSpec(1, (12,)), ShardSpec(0, (16,))]
)
def test_unshard_is_the_inverse_of_take_shard(spec: ShardSpec, size: int) -> None:
    full = torch.randn(16, 12)
    parts = [take_shard(full, spec, rank, size) for rank in range(size)]
    assert parts[0].shape[spec.dim] == full.shape[spec.dim] // size
    assert torch.equal(unshard(parts, spec), full)


@pytest.mark.parametrize("sections", [(12,), (8, 4), (4, 4, 8)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_indices_are_located_in_shards_and_back(sections: tuple[int, ...], size: int) -> None:
    spec = ShardSpec(0, sections)
    total = sum(sections)
    full = torch.arange(total)
    shards = [take_shard(full, spec, rank, size) for rank in range(size)]
    for start, stop in itertools.combinations(range(total + 1), 2):
        found = [
            shards[rank][local.start : local.stop]
            for rank, local in spec.locate(range(start, stop), size)
        ]
        assert torch.cat(found).tolist() == list(range(start, stop))
    for rank, shard in enumerate(shards):
        for start, stop in itertools.combinations(range(len(shard) + 1), 2):
            ranges = spec.full_indices(range(start, stop), rank, size)
            assert [*itertools.chain(*ranges)] == shard[start:stop].tolist()


def test_section_that_cannot_be_split_evenly_is_rejected() -> None:
    with raises_problem("section-not-divisible-by-tensor-parallel-size", contains=" 6 "):
        take_shard(torch.zeros(14), ShardSpec(0, (8, 6)), 0, 4)


def test_spec_is_read_back_and_deepspeed_sees_the_mark() -> None:
    from deepspeed.runtime.utils import is_model_parallel_parameter

    replicated, sharded = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    mark_sharded(sharded, ShardSpec(0, (8,)))
    assert (shard_spec(sharded), shard_spec(replicated)) == (ShardSpec(0, (8,)), None)
    assert is_model_parallel_parameter(sharded)
    assert not is_model_parallel_parameter(replicated)


def test_declared_parameter_has_its_own_memory() -> None:
    full = torch.ones(4, 2)
    draws = SimpleNamespace(normal=lambda name, std: lambda shape, dim, ranges: full[2:])
    weight = Weight("", (4, 2), ShardSpec(0, (4,)), std=1.0)
    param = declared_parameter(weight, Group((0, 1), 1, None), draws)
    full.zero_()
    assert param.shape == (2, 2)
    assert param.detach().eq(1.0).all()
    assert param.untyped_storage().nbytes() == 2 * 2 * 4
