"""The tiled MLP computes what the plain one does, with the inner activations of one tile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ds.config import ModelConfig
from megatron_ds.model.mlp import MLP, TiledMLP
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.mesh import Mesh
from tests.observed import Observed, tensors_of
from tests.unit.model.dense import TINY

HIDDEN = 32
BATCH = 2
LENGTHS = {1: 1, 5: 2, 64: 4, 70: 5}
"""Tiles by sequence length: one for each 32 tokens, at least two, none without a token."""


def build(kind: type[MLP], activation: str = "gelu") -> MLP:
    config = ModelConfig(**TINY, activation=activation, ffn_hidden_size=96)
    return kind(config, 0, group=Mesh.single().tp, init=Initializer(3))


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("length", LENGTHS)
def test_output_and_gradients_are_those_of_the_plain_mlp(length: int, activation: str) -> None:
    results = []
    for kind in (MLP, TiledMLP):
        mlp = build(kind, activation)
        x = torch.randn(length, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        out = mlp(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in mlp.parameters())])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_inner_activations_of_one_tile_exist_at_a_time() -> None:
    """Claim (parallel): a tiled MLP has the output and the gradients of a plain one, and the inner
    activations of one tile"""
    length = 64
    x = torch.randn(length, BATCH, HIDDEN, requires_grad=True)
    largest: dict[type[MLP], int] = {}
    for kind in (MLP, TiledMLP):
        sizes: list[int] = []

        def record(operator: Any, args: Any, result: Any, sizes: list[int] = sizes) -> None:
            sizes.extend(one.numel() for one in tensors_of(result))

        with Observed(record):
            build(kind)(x).sum().backward()
        largest[kind] = max(sizes)
    # The input is larger than a tile's length / 4 x BATCH x 96.
    assert largest == {MLP: length * BATCH * 96, TiledMLP: x.numel()}


def test_each_weight_s_gradient_is_complete_when_its_hook_runs() -> None:
    mlp = build(TiledMLP)
    calls = []
    for name, parameter in mlp.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    mlp(torch.randn(64, BATCH, HIDDEN, requires_grad=True)).sum().backward()
    assert sorted(calls) == sorted(name for name, _ in mlp.named_parameters())


@pytest.mark.parametrize("length", LENGTHS)
def test_evaluation_is_tiled_too(length: int) -> None:
    mlp = build(TiledMLP)
    tiles = []
    mlp.fc_in.register_forward_hook(lambda *_: tiles.append(1))
    x = torch.randn(length, BATCH, HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), build(MLP)(x))
    assert len(tiles) == LENGTHS[length]
