"""Logits equal those of a dense forward pass and of transformers' models with the same weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_ds.config.model import ACTIVATIONS, ModelConfig
from megatron_ds.model.gpt import GPTModel
from tests.dense_gpt import dense_logits
from tests.unit.model.dense import TINY, build_model

VOCAB, LENGTH = 50, 12
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
POSITIONS = ("learned_absolute", "rope", "alibi", "none")
LAYERS = range(TINY["num_layers"])
HEADS, HIDDEN = TINY["num_attention_heads"], TINY["hidden_size"]


def build(**options: Any) -> GPTModel:
    """A model whose parameters are all random, biases and norms included."""
    shape = {**TINY, "seq_length": LENGTH, "vocab_size": VOCAB, "norm_epsilon": 0.01}
    model = build_model(ModelConfig(**{**shape, **options})).eval()
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        values = 0.3 * torch.randn(param.shape, generator=generator)
        param.data.copy_(values + ("norm.weight" in name))
    return model


def logits(model: GPTModel) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS)
    return found[..., :VOCAB]


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest logit."""
    assert expected.abs().max() > 1.0
    error = (found.double() - expected.double()).abs().max() / expected.abs().max()
    assert error < 1e-5, error


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("position", POSITIONS)
def test_logits_equal_those_of_a_dense_forward_pass(position: str, normalization: str) -> None:
    """With every activation; the other options take turns."""
    gelus = [{"activation": "gelu", "gelu_approximation": kind} for kind in ("tanh", "none")]
    others = [{"activation": name} for name in ACTIVATIONS if name != "gelu"]
    turns = itertools.product((None, 2), (False, True), (False, True))
    for activation, (groups, flag, other) in zip([*gelus, *others], turns, strict=True):
        model = build(
            **activation,
            position_embedding_type=position,
            normalization=normalization,
            num_query_groups=groups,
            kv_channels=6 if other else None,
            rotary_percent=0.75 if flag and not other else 1.0,
            rotary_base=500.0,
            embed_layernorm=flag,
            untie_embeddings_and_output_weights=other,
        )
        expected = dense_logits(model.config, dict(model.named_parameters()), TOKENS)
        assert_equal(logits(model), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_default_gelu_depends_on_the_bias(bias: bool) -> None:
    model = build(add_bias_linear=bias)
    expected = dense_logits(model.config, dict(model.named_parameters()), TOKENS)
    assert_equal(logits(model), expected)


def layout_in(module: str, value: Tensor) -> Tensor:
    """A parameter as a module of transformers stores it."""
    if module.endswith("query_key_value"):  # q, k and v of each head are adjacent
        return value.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)
    return value.t() if ".c_" in module else value  # GPT-2's are [in, out]


def copy_weights(model: GPTModel, other: Any, names: dict[str, str], inner: dict[str, str]) -> None:
    """Loads the model's weights into a model of transformers.

    Args:
        names: Their names of the modules outside the layers, by canonical name.
        inner: Their names of the modules of layer {}, by canonical name.
    """
    pairs = dict(names)
    for layer in LAYERS:
        pairs |= {f"layers.{layer}.{ours}": name.format(layer) for ours, name in inner.items()}
    state = {}
    for name, param in model.named_parameters():
        module, _, kind = name.rpartition(".")
        state[f"{pairs[module]}.{kind}"] = layout_in(pairs[module], param.detach())
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied


def hf_logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(TOKENS).logits
    return found


def test_logits_equal_those_of_llama() -> None:
    model = build(
        position_embedding_type="rope",
        rotary_base=500.0,
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        num_query_groups=2,
        ffn_hidden_size=40,
        untie_embeddings_and_output_weights=True,
    )
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        intermediate_size=40,
        rms_norm_eps=0.01,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    llama = transformers.LlamaForCausalLM(config)
    state = {
        "model.embed_tokens.weight": model.embedding.word.weight[:VOCAB],
        "model.norm.weight": model.final_norm.weight,
        "lm_head.weight": model.get_parameter("head.weight")[:VOCAB],
    }
    for layer in LAYERS:
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        q, k, v = model.get_parameter(f"{ours}.attention.qkv.weight").split([32, 16, 16])
        gate, up = model.get_parameter(f"{ours}.mlp.fc_in.weight").chunk(2)
        attention = {"q": q, "k": k, "v": v}
        attention["o"] = model.get_parameter(f"{ours}.attention.proj.weight")
        mlp = {"gate": gate, "up": up}
        mlp["down"] = model.get_parameter(f"{ours}.mlp.fc_out.weight")
        norms = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
        state |= {f"{theirs}.self_attn.{name}_proj.weight": w for name, w in attention.items()}
        state |= {f"{theirs}.mlp.{name}_proj.weight": w for name, w in mlp.items()}
        for name, norm in norms.items():
            state[f"{theirs}.{name}.weight"] = model.get_parameter(f"{ours}.{norm}.weight")
    llama.load_state_dict(state)
    assert_equal(logits(model), hf_logits(llama))


def test_logits_equal_those_of_gpt2() -> None:
    model = build(make_vocab_size_divisible_by=1)
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=LENGTH,
            n_embd=HIDDEN,
            n_layer=len(LAYERS),
            n_head=HEADS,
            layer_norm_epsilon=0.01,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    inner = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.proj": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.fc_in": "mlp.c_fc",
        "mlp.fc_out": "mlp.c_proj",
    }
    copy_weights(
        model,
        gpt2,
        {
            "embedding.word": "transformer.wte",
            "embedding.position": "transformer.wpe",
            "final_norm": "transformer.ln_f",
        },
        {ours: f"transformer.h.{{}}.{name}" for ours, name in inner.items()},
    )
    assert_equal(logits(model), hf_logits(gpt2))


def test_logits_equal_those_of_gpt_neox() -> None:
    model = build(
        position_embedding_type="rope",
        rotary_base=500.0,
        rotary_percent=0.5,
        gelu_approximation="none",
        make_vocab_size_divisible_by=1,
        untie_embeddings_and_output_weights=True,
    )
    neox = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            num_hidden_layers=len(LAYERS),
            num_attention_heads=HEADS,
            intermediate_size=4 * HIDDEN,
            layer_norm_eps=0.01,
            hidden_act="gelu",
            use_parallel_residual=False,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
            },
        )
    )
    inner = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "attention.query_key_value",
        "attention.proj": "attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.fc_in": "mlp.dense_h_to_4h",
        "mlp.fc_out": "mlp.dense_4h_to_h",
    }
    copy_weights(
        model,
        neox,
        {
            "embedding.word": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "lm_head",
        },
        {ours: f"gpt_neox.layers.{{}}.{name}" for ours, name in inner.items()},
    )
    assert_equal(logits(model), hf_logits(neox))


def test_logits_equal_those_of_bloom() -> None:
    model = build(
        position_embedding_type="alibi", embed_layernorm=True, make_vocab_size_divisible_by=1
    )
    bloom = transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            n_layer=len(LAYERS),
            n_head=HEADS,
            layer_norm_epsilon=0.01,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    inner = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attention.query_key_value",
        "attention.proj": "self_attention.dense",
        "mlp_norm": "post_attention_layernorm",
        "mlp.fc_in": "mlp.dense_h_to_4h",
        "mlp.fc_out": "mlp.dense_4h_to_h",
    }
    copy_weights(
        model,
        bloom,
        {
            "embedding.word": "transformer.word_embeddings",
            "embedding.norm": "transformer.word_embeddings_layernorm",
            "final_norm": "transformer.ln_f",
        },
        {ours: f"transformer.h.{{}}.{name}" for ours, name in inner.items()},
    )
    assert_equal(logits(model), hf_logits(bloom))
