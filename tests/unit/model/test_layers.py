"""The list of layers: pipeline stages made of it compute what the plain model computes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron_ds.model.attention.packed import Keys, PackingOptions
from megatron_ds.model.declaration.residual import Residual
from megatron_ds.model.gpt import ALL_LAYERS, GPTModel
from megatron_ds.model.layers import CustomParts
from tests.proofs.cases import rotated, with_proofs
from tests.unit.model.dense import build_model, documents_of, gradients
from tests.unit.model.test_packed_attention import CONFIG, EOD, POSITIONS, TOKENS

LABELS = TOKENS.roll(-1, 1)
PACKING = PackingOptions(reset_positions=True, reset_attention=True)


def build(*stages: slice, **options: Any) -> GPTModel:
    config = dataclasses.replace(CONFIG, **options)
    return build_model(config, packing=PACKING, stages=stages or ALL_LAYERS)


@pytest.mark.parametrize(
    ("position", "untied", "cut"), with_proofs(*rotated(POSITIONS, (False, True), (1, 2, 3)))
)
def test_two_stages_equal_the_plain_model(position: str, untied: bool, cut: int) -> None:
    options = {"position_embedding_type": position, "untie_embeddings_and_output_weights": untied}
    plain = build(**options)
    inputs = {"documents": documents_of(plain, TOKENS, EOD)}
    loss = plain(TOKENS, LABELS, **inputs).mean()
    loss.backward()

    first = build(slice(cut), **options)
    second = build(slice(cut, None), **options)
    hidden = first.compute_stage(0, None, TOKENS, LABELS, **inputs)
    received = hidden.detach().requires_grad_()
    staged_loss = second.compute_stage(0, received, TOKENS, LABELS, **inputs).mean()
    staged_loss.backward()
    hidden.backward(received.grad)

    assert torch.equal(staged_loss, loss)
    found = gradients(first)
    for name, grad in gradients(second).items():
        # Both stages have the tied weight, whose gradient is the sum of theirs.
        found[name] = found[name] + grad if name in found else grad
    expected = gradients(plain)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_stages_have_canonical_names_and_share_the_tied_weight() -> None:
    stages = ((), (slice(2),), (slice(2, None),))
    plain, first, second = (dict(build(*stage).named_parameters()) for stage in stages)
    assert first.keys() & second.keys() == {"embedding.word.weight"}
    assert first.keys() | second.keys() == plain.keys()
    for params in (first, second):
        assert [name for name in params if not torch.equal(params[name], plain[name])] == []


@pytest.mark.parametrize(
    "residual",
    [
        Residual(),
        Residual(pre=False, post=True),  # OLMo 2
        Residual(post=True, scale=0.5),
        Residual(parallel=True),  # GPT-J
        Residual(parallel=True, post=True),
    ],
)
def test_a_layer_adds_to_the_residual_stream_in_several_forms(residual: Residual) -> None:
    model = build_model(
        CONFIG, parts=CustomParts(layer=lambda builder: builder.block(residual=residual))
    )
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            weight += 0.01 * torch.sin(torch.arange(weight.numel()) + index).view_as(weight)
    block: Any = model.blocks()[0]
    x = torch.randn(5, 2, CONFIG.hidden_size, generator=torch.Generator().manual_seed(0))
    keys = Keys(5, x.dtype, x.device)
    context = model.positions.contexts({block.layer: block.rule}, keys)[block.layer]

    def branch(name: str, x: torch.Tensor, compute: Any) -> torch.Tensor:
        before = "attention" if residual.parallel else name
        y = compute(getattr(block, f"{before}_norm")(x) if residual.pre else x)
        y = getattr(block, f"{name}_post_norm")(y) if residual.post else y
        return residual.scale * y

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = block.attention.project(x, context.rotation)
        return block.attention.output(context.core.attend(q, k, v, 0.0))

    attended = x + branch("attention", x, attention)
    expected = attended + branch("mlp", x if residual.parallel else attended, block.mlp)
    torch.testing.assert_close(block(x, context), expected, rtol=1e-6, atol=1e-6)
    norms = 2 * (residual.pre + residual.post) - (residual.pre and residual.parallel)
    assert sum(name.endswith("norm.weight") for name, _ in block.named_parameters()) == norms


@pytest.mark.parametrize("untied", [False, True])
def test_the_loss_can_normalize_over_padding(untied: bool) -> None:
    options = {"untie_embeddings_and_output_weights": untied, "hidden_dropout": 0.0}
    size = CONFIG.vocab_size
    plain = build(**options)
    padded = build(**options, softmax_vocab_size=size + 7, make_vocab_size_divisible_by=1)
    whole = build(**options, vocab_size=size + 7, make_vocab_size_divisible_by=1)
    padded.load_state_dict(whole.state_dict())

    inputs = {"documents": documents_of(plain, TOKENS, EOD)}
    loss = padded(TOKENS, LABELS, **inputs).mean()

    assert torch.equal(loss, whole(TOKENS, LABELS, **inputs).mean())
    assert not torch.equal(loss, plain(TOKENS, LABELS, **inputs).mean())
    assert padded(TOKENS, **inputs)[..., size:].isneginf().all()
