"""The model in one process: loss, logits, initial weights, cache, rejected inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.config.model.model import ModelConfig
from megatron_ds.inference.generation.kv_cache import PreallocatedCache
from megatron_ds.model.gpt import GPTModel
from tests.problems import raises_problem
from tests.unit.model.dense import TINY, build_model

CONFIG = ModelConfig(**TINY, seq_length=12, vocab_size=50, make_vocab_size_divisible_by=64)
SCORES = {
    "softmax_type": "learnable",
    "softmax_scale": 0.4,
    "attn_logit_softcapping": 2.0,
    "attention_output_gate": True,
    "final_logit_softcapping": 3.0,
}
"""Options of attention that need its scores, or change its output."""
POSITIONS = ("learned_absolute", "rope", "alibi", "none")


def build(**options: Any) -> GPTModel:
    return build_model(dataclasses.replace(CONFIG, **options))


def some_tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))


def test_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = build()
    tokens = some_tokens()
    logits = model(tokens)
    assert logits.shape == (2, 12, 64)
    assert logits[..., 50:].eq(-torch.inf).all()
    expected = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    torch.testing.assert_close(model(tokens, tokens).mean(), expected)


def test_masked_tokens_are_not_counted() -> None:
    model = build()
    tokens = some_tokens()
    mask = torch.ones(2, 12)
    mask[0, :5] = 0.0
    losses = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="none")
    expected = losses[mask.flatten() == 1.0].mean()
    torch.testing.assert_close(model(tokens, tokens, mask).mean(), expected)
    assert model(tokens, tokens, torch.zeros(2, 12)).mean().item() == 0.0


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("options", [{}, SCORES], ids=["plain", "scores"])
def test_cache_gives_the_logits_of_the_full_sequence(
    options: dict[str, Any], position: str, groups: int | None
) -> None:
    model = build(position_embedding_type=position, num_query_groups=groups, **options).eval()
    tokens = some_tokens()
    cache = PreallocatedCache(2, 12, torch.empty(0))
    with torch.no_grad():
        parts = [
            model(part, cache=cache.view(0, [part.shape[1]] * 2))
            for part in tokens.split([5, 1, 1, 4, 1], dim=1)
        ]
        torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens), rtol=1e-4, atol=1e-5)


def test_parameters_have_canonical_names_and_shapes() -> None:
    model = build(activation="swiglu", num_query_groups=2, embed_layernorm=True)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    layer = {name: shape for name, shape in shapes.items() if name.startswith("layers.1.")}
    ffn = model.config.mlp_hidden_size
    weights = {
        **dict.fromkeys(("attention_norm", "mlp_norm"), (32,)),
        "attention.qkv": (64, 32),
        "attention.proj": (32, 32),
        "mlp.fc_in": (2 * ffn, 32),
        "mlp.fc_out": (32, ffn),
    }
    assert layer == {
        **{f"layers.1.{name}.weight": shape for name, shape in weights.items()},
        **{f"layers.1.{name}.bias": shape[:1] for name, shape in weights.items()},
    }
    assert {name: shape for name, shape in shapes.items() if not name.startswith("layers.")} == {
        "embedding.word.weight": (64, 32),
        "embedding.position.weight": (12, 32),
        "embedding.norm.weight": (32,),
        "embedding.norm.bias": (32,),
        "final_norm.weight": (32,),
        "final_norm.bias": (32,),
    }
    untied = build(untie_embeddings_and_output_weights=True)
    assert untied.get_parameter("head.weight").shape == (64, 32)


def test_biases_follow_their_flags() -> None:
    def linear_biases(**options: bool) -> set[str]:
        names = (name for name, _ in build(**options).named_parameters())
        return {name.split(".", 2)[2] for name in names if name.endswith("bias") and ".0." in name}

    norms = {"attention_norm.bias", "mlp_norm.bias"}
    linear = {"attention.qkv.bias", "attention.proj.bias", "mlp.fc_in.bias", "mlp.fc_out.bias"}
    assert (linear_biases(), linear_biases(add_bias_linear=False)) == (norms | linear, norms)
    assert linear_biases(add_bias_linear=False, add_qkv_bias=True) == norms | {"attention.qkv.bias"}


def test_initial_weights_have_the_configured_standard_deviation() -> None:
    model = build(hidden_size=256, num_layers=8, vocab_size=200, init_method_std=0.05)
    for name, std in (
        ("attention.qkv", 0.05),
        ("mlp.fc_in", 0.05),
        # Into the residual stream: divided by sqrt(2 x 8 layers).
        ("attention.proj", 0.05 / 4.0),
        ("mlp.fc_out", 0.05 / 4.0),
    ):
        weight = model.get_parameter(f"layers.3.{name}.weight")
        assert weight.std().item() == pytest.approx(std, rel=0.02), name
    word = model.get_parameter("embedding.word.weight")
    assert word[200:].eq(0.0).all()
    assert word[:200].std().item() == pytest.approx(0.05, rel=0.02)
    position = model.get_parameter("embedding.position.weight")
    assert position.std().item() == pytest.approx(0.05, rel=0.05)
    assert model.get_parameter("layers.3.attention.qkv.bias").eq(0.0).all()


@pytest.mark.parametrize("of_embedding", [None, 0.01])
def test_initial_matrices_can_be_uniform(of_embedding: float | None) -> None:
    """Between the signs of sqrt(6 / (rows + columns)), of the complete fused matrix."""
    sizes = {"hidden_size": 256, "ffn_hidden_size": 512, "num_layers": 8, "vocab_size": 200}
    model = build(**sizes, init_method_xavier_uniform=True, embedding_init_method_std=of_embedding)
    shapes = {"attention.qkv": 768 + 256, "attention.proj": 512, "mlp.fc_out": 256 + 512}
    matrices = {f"layers.3.{name}.weight": size for name, size in shapes.items()}
    matrices |= {"embedding.word.weight": 200 + 256} if of_embedding is None else {}
    for name, size in matrices.items():
        weight = model.get_parameter(name)[:200]
        bound = (6.0 / size) ** 0.5
        assert 0.99 * bound < weight.abs().max() <= bound, name
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02), name
        assert weight.mean().abs() < 0.01 * bound, name
    if of_embedding is not None:
        for name in ("embedding.word.weight", "embedding.position.weight"):
            weight = model.get_parameter(name)[:200]
            assert weight.std().item() == pytest.approx(of_embedding, rel=0.05), name
            assert weight.abs().max() > 2.5 * of_embedding, name
    assert model.get_parameter("final_norm.weight").eq(1.0).all()


@pytest.mark.parametrize("wrong", [50, 63, -1])
def test_token_ids_outside_the_vocabulary_are_rejected(wrong: int) -> None:
    model = build()
    tokens = some_tokens()
    broken = tokens.clone()
    broken[1, 3] = wrong
    for inputs in ((broken, None), (tokens, broken)):
        with raises_problem("token-id-outside-vocabulary", contains=f"token id {wrong} "):
            model(*inputs)


def test_sequences_longer_than_the_learned_positions_are_rejected() -> None:
    model = build(max_position_embeddings=16)
    model(some_tokens(length=16))
    with raises_problem("sequence-longer-than-learned-positions", "max_position_embeddings"):
        model(some_tokens(length=17))
    build(position_embedding_type="rope")(some_tokens(length=40))


def test_dropout_follows_the_position_in_training_only() -> None:
    model = build(attention_dropout=0.2, hidden_dropout=0.2)
    tokens = some_tokens()

    def losses(position: int, stride: int, *modes: bool) -> list[float]:
        """Losses of consecutive forward passes in training (True) or evaluation (False)."""
        model.layers["0"].attention.rng.begin_step(1, position, stride)
        return [model.train(mode)(tokens, tokens).loss_sum.item() for mode in modes]

    at_8, at_10, evaluated = losses(8, 2, True, True, False)
    assert (len({at_8, at_10, evaluated}), losses(10, 1, True)) == (3, [at_10])
    # Evaluation does not take a micro-batch's place.
    assert losses(8, 2, True, False, True) == [at_8, evaluated, at_10]
    assert evaluated == build()(tokens, tokens).loss_sum.item()


@pytest.mark.parametrize("norm", [False, True])
def test_embeddings_are_dropped_after_positions_and_norm(norm: bool) -> None:
    embedding = build(hidden_dropout=0.3, embed_layernorm=norm).embedding
    tokens = some_tokens(40)
    complete = embedding.eval()(tokens, 0)
    dropped = embedding.train()(tokens, 0)
    kept = dropped != 0
    assert kept.double().mean().item() == pytest.approx(0.7, abs=0.02)
    torch.testing.assert_close(dropped[kept], complete[kept] / 0.7)


@pytest.mark.parametrize("position", POSITIONS)
def test_bf16_is_close_to_fp32(position: str) -> None:
    model = build(position_embedding_type=position)
    tokens = some_tokens()
    expected = model(tokens, tokens).loss_sum
    loss = model.to(torch.bfloat16)(tokens, tokens).loss_sum
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_model_continues_with_the_positions_of_another_stage() -> None:
    """Also where an earlier, shorter table of the same rotation is known."""
    short = dataclasses.replace(CONFIG, seq_length=4, position_embedding_type="rope")
    bases = dataclasses.replace(short, seq_length=12, rotary_base_per_layer=(50.0, 5e5))
    yarn = {"rotary_scaling_factor": 3.0, "yarn_original_max_position_embeddings": 4}
    scaled = dataclasses.replace(short, seq_length=8, position_embedding_type="yarn", **yarn)
    model = build_model(short)
    for config in (short, bases, scaled, dataclasses.replace(short, seq_length=9)):
        tokens_BS = torch.arange(config.seq_length)[None]
        model.enter_phase(config)
        assert torch.equal(model(tokens_BS), build_model(config)(tokens_BS))
        changed = config.rotary_bases != short.rotary_bases or config is scaled
        assert torch.equal(model(tokens_BS), build_model(short)(tokens_BS)) is not changed
