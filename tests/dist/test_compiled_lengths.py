"""Compiled layers under a sequence length that changes: traced anew once, not for each length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from megatron_ds.config import ModelConfig
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

LENGTHS = (8, 12, 24)
END = 5
"""The token that ends a document: at several places of each length."""


@pytest.fixture(autouse=True)
def traced_and_not_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are traced as for the compiler, which is what a new length may bring again."""
    compiled = nn.Module.compile

    def traced(module: nn.Module, **options: Any) -> None:
        compiled(module, backend="eager", **options)

    monkeypatch.setattr(nn.Module, "compile", traced)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(positions: str, documents: PackingOptions | None) -> list[int]:
    """Graphs that were made up to each length, forwards and backwards."""
    config = ModelConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=24,
        vocab_size=32,
        position_embedding_type=positions,
        attention_dropout=0.0,
    )
    model = GPTModel(config, mesh=Mesh.single(), rng=RngStreams(0), seed=1, documents=documents)
    model.compile_layers(lengths_vary=True)
    before, found = counters["stats"]["unique_graphs"], []
    for length in LENGTHS:
        tokens_BS = torch.arange(2 * length).view(2, length) % 32
        model(tokens_BS, tokens_BS).loss_sum.backward()
        found.append(counters["stats"]["unique_graphs"] - before)
    return found


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("positions", ["rope", "alibi"])
def test_the_second_length_stands_for_all_others(positions: str, inside: bool) -> None:
    found = graphs(positions, PackingOptions(END, True, True) if inside else None)
    assert found[0] > 0
    assert found[1:] == [2 * found[0]] * (len(LENGTHS) - 1)
