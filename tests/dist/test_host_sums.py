"""Sums over tensor-parallel ranks of one machine, in memory that they share."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.parallel import host_sums
from megatron_ds.parallel.collectives import (
    all_gather,
    copy_to_group,
    reduce_from_group_,
    start_all_reduce_,
)
from megatron_ds.parallel.host_sums import SLOT_BYTES
from megatron_ds.parallel.mesh import Mesh
from tests.distributed import run_ranks

SHAPES = ((0,), (1,), (3, 1, 5), (SLOT_BYTES // 2 + 3,))
"""The last one takes three slots in fp32."""
TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def summand(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul_(100).to(dtype)


def sums(rank: int, folder: Path) -> None:
    with mock.patch.object(host_sums, "MEMORY", folder):
        group = Mesh.build(dist.get_world_size()).tp
    assert group.host_sum is not None
    for dtype in TYPES:
        for shape in SHAPES:
            x = summand(rank, shape, dtype)
            by_gloo = x.clone()
            dist.all_reduce(by_gloo)
            ours = reduce_from_group_(x.clone(), group)
            assert start_all_reduce_(x, group) is None
            assert torch.equal(ours, x)
            if group.size == 2:
                assert torch.equal(ours, by_gloo)
            others = [summand(other, shape, dtype) for other in group.ranks]
            assert torch.equal(ours, functools.reduce(torch.add, others))
            assert all(torch.equal(ours, of_rank) for of_rank in all_gather(ours, group))
    weight = torch.full((4,), rank + 1.0, requires_grad=True)
    (copy_to_group(weight, group) * (rank + 1)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [sum(range(group.size + 1))] * 4
    assert not any(folder.iterdir())


def compiled(rank: int) -> None:
    """In a graph, the sums are where they are without one."""
    group = Mesh.build(2).tp

    def compute(x: Tensor) -> Tensor:
        first = reduce_from_group_(x * 2, group)
        return first + reduce_from_group_(first.sin(), group)

    x = summand(rank, (5, 7), torch.float32)
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError):
        traced = torch.compile(compute, backend="aot_eager", fullgraph=True)
        assert torch.equal(traced(x), compute(x))


def faults(rank: int, folder: Path) -> None:
    for place in ("_make_folder", "_open"):
        answer = mock.Mock(return_value=None)
        # Of the ranks, one alone cannot take part.
        broken = mock.patch.object(host_sums, place, answer)
        with mock.patch.object(host_sums, "MEMORY", folder):
            if rank == (0 if place == "_make_folder" else 1):
                with broken:
                    group = Mesh.build(2).tp
            else:
                group = Mesh.build(2).tp
        assert group.host_sum is None, place
        assert reduce_from_group_(torch.ones(3), group).tolist() == [2.0] * 3
    dist.barrier()
    assert not any(folder.iterdir())

    host_sum = Mesh.build(2, timeout=timedelta(seconds=2)).tp.host_sum
    assert host_sum is not None
    with pytest.raises(RuntimeError, match="different tensors"):
        host_sum.sum_(torch.ones(4 + rank))
    if rank == 0:
        with pytest.raises(RuntimeError, match="missing"):  # the other one does not call
            host_sum.sum_(torch.ones(4))
    dist.barrier()
    if rank == 1:
        del host_sum
        dist.barrier()
        return
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"ended|missing"):
        host_sum.sum_(torch.ones(4))


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_the_bits_of_the_sum(ranks: int, tmp_path: Path) -> None:
    """Claim (parallel): sums over tensor-parallel ranks of one machine in shared memory are those
    of gloo for two ranks, bit for bit, and the same on all ranks for more
    """
    run_ranks(sums, ranks, tmp_path, timeout=120)


def test_graphs_have_the_sums() -> None:
    run_ranks(compiled, 2, timeout=120)


def test_ranks_that_share_no_memory_or_leave_are_noticed(tmp_path: Path) -> None:
    run_ranks(faults, 2, tmp_path, timeout=120)
