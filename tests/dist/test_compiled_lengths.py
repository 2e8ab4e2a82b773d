"""Compiled layers are whole graphs, traced twice for varying lengths or numbers of documents."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention.packed import PackingOptions, VarlenKernel
from megatron_ds.model.kernels.compilation import compile_layers
from tests.unit.model.dense import build_model, computed_by, dense_varlen, documents_of
from tests.unit.model.test_packed_attention import CONFIG

LENGTHS = (8, 12, 24)
EOD = 5
"""Token that ends a document; occurs several times in each length."""


@pytest.fixture(autouse=True)
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces layers without compiling them; a graph break is an error."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(positions: str, packing: PackingOptions | None, kernel: Any) -> list[int]:
    """Number of graphs traced up to each length, forward and backward."""
    config = ModelConfig(
        num_layers=3,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        seq_length=24,
        vocab_size=32,
        position_embedding_type=positions,
        attention_dropout=0.1 if kernel is None else 0.0,
        hidden_dropout=0.1,
        activation="swiglu",
    )
    model = build_model(config, packing=packing, attention=computed_by(kernel, config))
    compile_layers(model, lengths_vary=True)
    before = counters["stats"]["unique_graphs"]
    found = []
    for length in LENGTHS:
        tokens_BS = torch.arange(2 * length).view(2, length) % 32
        documents = documents_of(model, tokens_BS, EOD)
        model(tokens_BS, tokens_BS, documents=documents).loss_sum.backward()
        found.append(counters["stats"]["unique_graphs"] - before)
    return found


def assert_traced_twice(found: list[int]) -> None:
    """Later shapes need no graph; the second one may need fewer than twice those of the first.

    The loss's kernels see the second shape of a tensor in the first backward pass already.
    """
    assert 0 < found[0] < found[1] <= 2 * found[0]
    assert found[1:] == [found[1]] * (len(found) - 1)


@pytest.mark.parametrize(
    ("positions", "packing", "kernel"),
    [
        ("rope", None, None),
        pytest.param("alibi", None, None, marks=pytest.mark.proof),
        ("rope", PackingOptions(True, True), None),
        ("rope", PackingOptions(True, True), VarlenKernel(dense_varlen)),
    ],
)
def test_two_traces_serve_all_lengths(
    positions: str, packing: PackingOptions | None, kernel: Any
) -> None:
    found = graphs(positions, packing, kernel)
    assert_traced_twice(found)


def test_two_traces_serve_all_numbers_of_documents() -> None:
    attention = computed_by(VarlenKernel(dense_varlen), CONFIG)
    model = build_model(CONFIG, packing=PackingOptions(False, True), attention=attention)
    compile_layers(model)
    before = counters["stats"]["unique_graphs"]
    found = []
    for bound in (10, 20, 40, 60):
        tokens_BS = torch.zeros((2, CONFIG.seq_length), dtype=torch.int64)
        documents = documents_of(model, tokens_BS, EOD, bound)
        model(tokens_BS, tokens_BS, documents=documents).loss_sum.backward()
        found.append(counters["stats"]["unique_graphs"] - before)
    assert_traced_twice(found)
