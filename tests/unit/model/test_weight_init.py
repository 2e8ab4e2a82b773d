"""Initial weights: the same for every layout and number of threads, and normally distributed."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.model import weight_init
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import declared_parameter, shard_spec, unshard
from megatron_ds.parallel.weights import ShardSpec, Weight, linear_weights


def draw(name: str = "a", rows: int = 4, columns: int = 3, *, seed: int = 3) -> torch.Tensor:
    return Initializer(seed).normal(name, 1.0)((rows, columns), 0, [range(rows)])


def test_values_depend_on_seed_and_name_only() -> None:
    torch.manual_seed(1)
    first = draw()
    torch.manual_seed(2)
    assert torch.equal(draw(), first)
    assert not torch.equal(draw(seed=4), first)
    assert not torch.equal(draw("b"), first)
    assert torch.equal(draw(rows=40)[:4], first)


def test_values_are_fixed() -> None:
    """Another version of this package, numpy or Python starts from the same model."""
    expected = [0.0928, 0.6746, 0.0867]
    torch.testing.assert_close(draw(rows=1)[0], torch.tensor(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [2, 4])
def test_shards_are_those_of_one_process(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small, so that shards begin and end within blocks and chunks.
    monkeypatch.setattr(weight_init, "BLOCK", 64)
    monkeypatch.setattr(weight_init, "CHUNK", 256)

    def build(group: Group, threads: int) -> list[torch.nn.Parameter]:
        init = Initializer(3, threads)
        rows = ShardSpec(0, (40, 20, 20))
        columns = ShardSpec(1, (20,))
        weights = linear_weights("column", (80, 24), rows, bias=False, std=0.5)
        column = ColumnParallelLinear(*weights, group=group, init=init)
        weights = linear_weights("row", (56, 20), columns, bias=False, std=0.5)
        row = RowParallelLinear(*weights, group=group, init=init)
        table = Weight("word", (64, 24), ShardSpec(0, (64,)), 0.5, padding=14)
        return [column.weight, row.weight, declared_parameter(table, group, init)]

    expected = build(Group((0,), 0, None), threads=1)
    ranks = tuple(range(size))
    shards = zip(*(build(Group(ranks, rank, None), threads=3) for rank in ranks), strict=True)
    for parts, full in zip(shards, expected, strict=True):
        spec = shard_spec(full)
        assert spec is not None
        assert torch.equal(unshard([part.detach() for part in parts], spec), full.detach())
    assert expected[2][50:].eq(0.0).all()
    assert expected[2][:50].ne(0.0).all()


def test_values_are_normally_distributed() -> None:
    values = draw(rows=2000, columns=1000).double().flatten()
    assert values.mean().abs() < 4e-3
    assert values.std().item() == pytest.approx(1.0, abs=3e-3)
    assert (values**3).mean().abs() < 1e-2
    assert (values**4).mean().item() == pytest.approx(3.0, abs=3e-2)
    assert 4.5 < values.abs().max() < 6.0
    assert torch.stack([values[:-1], values[1:]]).corrcoef()[0, 1].abs() < 4e-3


def test_nothing_is_drawn_without_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(weight_init, "_fill_chunk")
    assert Initializer(None).normal("a", 1.0)((6, 4), 1, [range(2, 4)]).shape == (6, 2)
