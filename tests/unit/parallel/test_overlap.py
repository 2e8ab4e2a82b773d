"""The order of matrix products and collectives in the backward pass of tensor-parallel layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ds.parallel.fused_linear_cross_entropy import linear_cross_entropy
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.weights import ShardSpec, linear_weights
from tests.observed import Observed

HIDDEN = 8
TWO_RANKS = Group(ranks=(0, 1), rank=0, handle=None)
SEQUENCE = dataclasses.replace(TWO_RANKS, sequence_parallel=True)
COPIES = (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy)


class Events(Observed):
    """Records products, copies and all-reduces; stands in for the group, whose sum is doubled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(self._record)
        self.found: list[str] = []
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "all_gather_into_tensor", self.all_gather)
        monkeypatch.setattr(dist, "reduce_scatter_tensor", self.reduce_scatter)

    def all_reduce(self, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        x.mul_(2.0)
        if not async_op:
            self.found.append("all-reduce")
            return None
        return self.start("all-reduce")

    def all_gather(self, full: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool) -> Any:
        full.copy_(torch.cat([x, x]))
        del self.found[-1]  # the copy
        return self.start("all-gather")

    def reduce_scatter(
        self, x: torch.Tensor, full: torch.Tensor, group: Any, async_op: bool
    ) -> Any:
        x.copy_(2.0 * full[: len(x)])
        del self.found[-1]
        return self.start("reduce-scatter")

    def start(self, collective: str) -> SimpleNamespace:
        self.found.append(f"start of {collective}")
        return SimpleNamespace(wait=lambda: self.found.append(f"end of {collective}"))

    def _record(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        if operator in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.found.append("product")
        elif operator in COPIES:
            self.found.append("copy")


def draw(shape: tuple[int, ...], dim: int, ranges: Sequence[range]) -> torch.Tensor:
    rows = sum(map(len, ranges))
    return torch.randn([rows if at == dim else size for at, size in enumerate(shape)])


DRAWS = SimpleNamespace(normal=lambda name, std: draw)


def column(group: Group, bias: bool) -> ColumnParallelLinear:
    torch.manual_seed(1)
    rows = 6 * group.size
    weights = linear_weights("", (rows, HIDDEN), ShardSpec(0, (rows,)), bias=bias, std=1.0)
    return ColumnParallelLinear(*weights, group=group, init=DRAWS)


@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_reduces_the_input_gradient_beside_the_weight_gradient(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (precision): under tensor parallelism the all-reduce of a layer's input gradient runs
    alongside the product for its weight gradient, and nothing is copied for it"""
    layer = column(TWO_RANKS, bias)
    alone = column(Mesh.single().tp, bias)
    x = torch.randn(4, 2, HIDDEN, requires_grad=True)
    grad = torch.randn(4, 2, 6)
    (expected,) = torch.autograd.grad(alone(x), x, grad, retain_graph=True)
    alone(x).backward(grad)
    x.grad = None
    y = layer(x)
    with Events(monkeypatch) as events:
        y.backward(grad)
    assert events.found == ["product", "start of all-reduce", "product", "end of all-reduce"]
    assert torch.equal(x.grad, 2 * expected)
    for parameter, one in zip(layer.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter.grad, one.grad)


def test_sequence_parallel_gathers_and_scatters_beside_the_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = column(SEQUENCE, True)
    alone = column(Mesh.single().tp, True)
    x = torch.randn(2, 2, HIDDEN, requires_grad=True)
    full = torch.empty(4, 2, HIDDEN)
    full = x.detach().repeat(2, 1, 1).requires_grad_()
    grad = torch.randn(4, 2, 6)
    alone(full).backward(grad)
    with Events(monkeypatch) as events:
        y = layer(x)
        y.backward(grad)
    assert events.found == [
        "start of all-gather",
        "end of all-gather",
        "product",
        "start of all-gather",
        "product",
        "start of reduce-scatter",
        "end of all-gather",
        "product",
        "end of reduce-scatter",
    ]
    assert torch.equal(x.grad, 2 * full.grad[:2])
    for parameter, one in zip(layer.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter.grad, one.grad)


def test_row_parallel_reduces_its_output_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = ShardSpec(1, (2 * HIDDEN,))
    weights = linear_weights("", (HIDDEN, 2 * HIDDEN), columns, bias=False, std=1.0)
    layer = RowParallelLinear(*weights, group=TWO_RANKS, init=DRAWS)
    x = torch.randn(4, 2, HIDDEN, requires_grad=True)
    with Events(monkeypatch) as events:
        y = layer(x)
        y.sum().backward()
    assert events.found == ["product", "all-reduce", "product", "product"]
    assert torch.equal(y, 2 * torch.nn.functional.linear(x, layer.weight))


def test_output_layer_reduces_the_input_gradient_beside_scaling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight = (torch.randn(16, HIDDEN, requires_grad=True) for _ in range(2))
    monkeypatch.setattr(dist, "all_gather", lambda parts, x, group: [p.copy_(x) for p in parts])
    loss, _ = linear_cross_entropy(
        x, weight, torch.arange(16), None, vocab_size=32, group=TWO_RANKS
    )
    with Events(monkeypatch) as events:
        loss.backward()
    assert events.found == ["start of all-reduce", "end of all-reduce"]
