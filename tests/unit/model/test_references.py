"""Logits equal those of a dense forward pass; logits, loss and gradients equal those of
transformers' models with the same weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_ds.config.model import ACTIVATIONS, ModelConfig
from megatron_ds.model.gpt import GPTModel
from tests.dense_gpt import dense_logits
from tests.unit.model.dense import TINY, build_model, gradients

VOCAB, LENGTH = 50, 12
TOKENS = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
POSITIONS = ("learned_absolute", "rope", "alibi", "none")


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


@dataclass(frozen=True)
class Family:
    """A model of transformers, and where it has the tensors of ours.

    Attributes:
        ours: Options of our model.
        theirs: Class, class of the configuration, and options besides `SIZES`.
        names: Their names of the modules outside the layers, by canonical name.
        layer: Their name of layer {}, and of its modules by canonical name. Where ours stores
            several matrices in one, theirs has a name for each.
    """

    ours: dict[str, Any]
    theirs: tuple[Any, Any, dict[str, Any]]
    names: dict[str, str]
    layer: tuple[str, dict[str, str]]

    def build(self) -> tuple[GPTModel, Any]:
        """Our model, and theirs with the same weights."""
        ours = build(**self.ours)
        model, config, options = self.theirs
        sizes = {config.attribute_map.get(name, name): size for name, size in SIZES.items()}
        special = {"bos_token_id": 0, "eos_token_id": 0}
        theirs = model(config(**{**sizes, **special, **options})).eval()
        weights = {name: param.detach() for name, param in ours.named_parameters()}
        missing, unexpected = theirs.load_state_dict(self.translated(weights), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}  # tied
        return ours, theirs

    def translated(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights, or their gradients, under their names and in their layouts."""
        path, inner = self.layer
        modules = dict(self.names)
        for layer in range(SIZES["num_hidden_layers"]):
            for name, theirs in inner.items():
                parts = [f"{path.format(layer)}.{part}" for part in theirs.split()]
                modules[f"layers.{layer}.{name}"] = " ".join(parts)
        found = {}
        for name, value in tensors.items():
            module, _, kind = name.rpartition(".")
            parts = modules[module].split()
            for part, matrix in zip(parts, _split(value, len(parts)), strict=True):
                found[f"{part}.{kind}"] = _layout_in(part, matrix)
        return found


SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": TINY["hidden_size"],
    "num_hidden_layers": TINY["num_layers"],
    "num_attention_heads": TINY["num_attention_heads"],
}
ROPE = {"rope_type": "default", "rope_theta": 500.0}


def _split(value: Tensor, parts: int) -> tuple[Tensor, ...]:
    """The matrices of one: queries, keys and values of two query groups, or two halves."""
    sizes = {1: len(value), 2: len(value) // 2, 3: [32, 16, 16]}
    return value.split(sizes[parts])


def _layout_in(module: str, value: Tensor) -> Tensor:
    """A tensor as a module of transformers stores it."""
    if module.endswith("query_key_value"):  # q, k and v of each head are adjacent
        heads = TINY["num_attention_heads"]
        return value.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    if ".c_" in module:  # GPT-2's are [in, out]
        return value.t()
    return value[:VOCAB] if "embed_tokens" in module or "lm_head" in module else value


FAMILIES = {
    "llama": Family(
        {
            "position_embedding_type": "rope",
            "rotary_base": 500.0,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "add_bias_linear": False,
            "num_query_groups": 2,
            "ffn_hidden_size": 40,
            "untie_embeddings_and_output_weights": True,
        },
        (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig,
            {
                "num_key_value_heads": 2,
                "intermediate_size": 40,
                "rms_norm_eps": 0.01,
                "rope_parameters": ROPE,
            },
        ),
        {"embedding.word": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
        (
            "model.layers.{}",
            {
                "attention_norm": "input_layernorm",
                "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                "attention.proj": "self_attn.o_proj",
                "mlp_norm": "post_attention_layernorm",
                "mlp.fc_in": "mlp.gate_proj mlp.up_proj",
                "mlp.fc_out": "mlp.down_proj",
            },
        ),
    ),
    "gpt2": Family(
        {"make_vocab_size_divisible_by": 1},
        (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config,
            {"n_positions": LENGTH, "layer_norm_epsilon": 0.01},
        ),
        {
            "embedding.word": "transformer.wte",
            "embedding.position": "transformer.wpe",
            "final_norm": "transformer.ln_f",
        },
        (
            "transformer.h.{}",
            {
                "attention_norm": "ln_1",
                "attention.qkv": "attn.c_attn",
                "attention.proj": "attn.c_proj",
                "mlp_norm": "ln_2",
                "mlp.fc_in": "mlp.c_fc",
                "mlp.fc_out": "mlp.c_proj",
            },
        ),
    ),
    "gpt-neox": Family(
        {
            "position_embedding_type": "rope",
            "rotary_base": 500.0,
            "rotary_percent": 0.5,
            "gelu_approximation": "none",
            "make_vocab_size_divisible_by": 1,
            "untie_embeddings_and_output_weights": True,
        },
        (
            transformers.GPTNeoXForCausalLM,
            transformers.GPTNeoXConfig,
            {
                "intermediate_size": 4 * TINY["hidden_size"],
                "layer_norm_eps": 0.01,
                "hidden_act": "gelu",
                "use_parallel_residual": False,
                "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
            },
        ),
        {
            "embedding.word": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "lm_head",
        },
        (
            "gpt_neox.layers.{}",
            {
                "attention_norm": "input_layernorm",
                "attention.qkv": "attention.query_key_value",
                "attention.proj": "attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "mlp.fc_in": "mlp.dense_h_to_4h",
                "mlp.fc_out": "mlp.dense_4h_to_h",
            },
        ),
    ),
    "bloom": Family(
        {
            "position_embedding_type": "alibi",
            "embed_layernorm": True,
            "make_vocab_size_divisible_by": 1,
        },
        (
            transformers.BloomForCausalLM,
            transformers.BloomConfig,
            {"layer_norm_epsilon": 0.01},
        ),
        {
            "embedding.word": "transformer.word_embeddings",
            "embedding.norm": "transformer.word_embeddings_layernorm",
            "final_norm": "transformer.ln_f",
        },
        (
            "transformer.h.{}",
            {
                "attention_norm": "input_layernorm",
                "attention.qkv": "self_attention.query_key_value",
                "attention.proj": "self_attention.dense",
                "mlp_norm": "post_attention_layernorm",
                "mlp.fc_in": "mlp.dense_h_to_4h",
                "mlp.fc_out": "mlp.dense_4h_to_h",
            },
        ),
    ),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_logits_loss_and_gradients_equal_those_of_transformers(family: Family) -> None:
    """The gradient of every parameter, to 1e-5 of its largest element."""
    ours, theirs = family.build()
    reference = theirs(TOKENS, labels=TOKENS)
    assert_equal(logits(ours), reference.logits.detach())

    loss = ours(TOKENS[:, :-1], TOKENS[:, 1:]).mean()
    assert loss.item() == pytest.approx(reference.loss.item(), rel=1e-6)

    loss.backward()
    reference.loss.backward()
    expected = {name: param.grad for name, param in theirs.named_parameters()}
    found = family.translated(gradients(ours))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 1e-5, (name, error)
