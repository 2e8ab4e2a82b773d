"""Cutting and joining parameters."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.parallel.sharding import (
    ShardSpec,
    mark_sharded,
    shard_spec,
    sharded_parameter,
    take_shard,
    unshard,
)


def test_each_section_is_cut_by_itself() -> None:
    full = torch.arange(8)  # q: 0 1 2 3, k: 4 5, v: 6 7
    spec = ShardSpec(0, (4, 2, 2))
    assert take_shard(full, spec, 0, 2).tolist() == [0, 1, 4, 6]
    assert take_shard(full, spec, 1, 2).tolist() == [2, 3, 5, 7]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "spec", [ShardSpec(0, (8, 4, 4)), ShardSpec(1, (12,)), ShardSpec(0, (16,))]
)
def test_join_undoes_the_cut(spec: ShardSpec, size: int) -> None:
    full = torch.randn(16, 12)
    parts = [take_shard(full, spec, rank, size) for rank in range(size)]
    assert parts[0].shape[spec.dim] == full.shape[spec.dim] // size
    assert torch.equal(unshard(parts, spec), full)


def test_a_section_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a section of 6 .* over 4"):
        take_shard(torch.zeros(14), ShardSpec(0, (8, 6)), 0, 4)


def test_declaration_is_read_back_and_marks_for_deepspeed() -> None:
    from deepspeed.runtime.utils import is_model_parallel_parameter

    replicated, cut = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    mark_sharded(cut, ShardSpec(0, (8,)))
    assert (shard_spec(cut), shard_spec(replicated)) == (ShardSpec(0, (8,)), None)
    assert is_model_parallel_parameter(cut)
    assert not is_model_parallel_parameter(replicated)


def test_a_sharded_parameter_shares_nothing_with_the_full_tensor() -> None:
    full = torch.ones(4, 2)
    param = sharded_parameter(full, ShardSpec(0, (4,)), 1, 2)
    full.zero_()
    assert param.shape == (2, 2)
    assert param.detach().eq(1.0).all()
    assert param.untyped_storage().nbytes() == 2 * 2 * 4
