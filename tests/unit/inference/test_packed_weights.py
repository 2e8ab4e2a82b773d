"""Weights in the layout of the CPU's kernels."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.inference.generation import packed_weights
from megatron_ds.inference.generation.packed_weights import PackedProduct, pack_weights
from tests.proofs.cases import rotated, with_proofs
from tests.unit.inference.models import KINDS, model_of

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


@pytest.mark.parametrize(("kind", "small"), with_proofs(*rotated(KINDS, (0, 2**18))))
def test_logits_are_those_of_the_weights(
    kind: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): weights in the layout of the CPU's kernels give the same logits"""
    monkeypatch.setattr(packed_weights, "SMALL", small)
    model = model_of(kind)
    with torch.no_grad():
        expected = model(TOKENS), model(TOKENS[:1, :1])
        pack_weights(model)
        found = model(TOKENS), model(TOKENS[:1, :1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if small:  # then they are used for single tokens
        assert all(each.numel() for each in model.parameters())
        return
    emptied = [name for name, each in model.named_parameters() if each.numel() == 0]
    tied = not model.config.untie_embeddings_and_output_weights
    matrices = [name for name, each in model_of(kind).named_parameters() if each.dim() == 2]
    kept = {"embedding.word.weight", "embedding.position.weight"}
    assert emptied == [name for name in matrices if name not in kept]
    assert ("head.weight" in emptied) != tied


def test_a_machine_without_such_kernels_keeps_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def __init__(self, weight: torch.Tensor) -> None:
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(packed_weights, "PackedProduct", Missing)
    model = model_of("rope")
    pack_weights(model)
    assert all(each.numel() for each in model.parameters())
    model(TOKENS)


def test_a_bias_is_added() -> None:
    weight = torch.randn(7, 5)
    bias = torch.randn(7)
    x = torch.randn(2, 3, 5)
    with torch.no_grad():
        found = PackedProduct(weight)(x, bias)
    torch.testing.assert_close(found, x @ weight.T + bias, rtol=1e-4, atol=1e-5)
