"""Counted operations, compared with those of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.model.declaration.architecture import model_spec
from tests.unit.model.dense import TINY, build_model

BATCH = 2
EXPERTS = MoEConfig(num_experts=(4,), expert_interval=2, moe_router_topk=3)


def of_groups(a: torch.Size, b: torch.Size, *_: object, **__: object) -> int:
    """Of a grouped product, whose groups divide the rows of `a` or the inner dimension."""
    return 2 * a[-2] * a[-1] * b[-1]


def measured_flops(config: ModelConfig, moe: MoEConfig) -> int:
    """Operations of one forward and backward pass, as torch counts them."""
    model = build_model(config, moe=moe)
    tokens = torch.randint(0, config.vocab_size, (BATCH, config.seq_length))
    # The flash kernel's backward recomputes the scores; plain products count what the model needs.
    count = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: of_groups})
    with count as counter, sdpa_kernel(SDPBackend.MATH):
        model.train()(tokens, tokens).weighted(None)[0].backward()
    return counter.get_total_flops()


def configuration(**changes: Any) -> ModelConfig:
    return ModelConfig(**TINY, seq_length=16, vocab_size=128, **changes)


FORMS: list[dict[str, Any]] = [
    {
        "num_query_groups": groups,
        "activation": activation,
        "untie_embeddings_and_output_weights": is_untied,
    }
    for groups in (None, 2)
    for activation in ("gelu", "swiglu")
    for is_untied in (False, True)
]
DEEPSEEK: dict[str, Any] = {
    "multi_latent_attention": True,
    "position_embedding_type": "rope",
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "mtp_num_layers": 2,
}


@pytest.mark.parametrize("form", [*FORMS, DEEPSEEK], ids=str)
@pytest.mark.parametrize("moe", [MoEConfig(), EXPERTS], ids=["dense", "experts"])
def test_model_flops_are_those_that_torch_counts(form: dict[str, Any], moe: MoEConfig) -> None:
    """Claim (logging): model TFLOP/s agree with torch's count"""
    config = configuration(**form)
    if moe.is_used:  # the gradients of their biases are products, too
        config = dataclasses.replace(config, add_bias_linear=False)
    counted = BATCH * model_spec(config, moe).flops(config.seq_length)
    assert counted == pytest.approx(measured_flops(config, moe), rel=0.01)


@pytest.mark.parametrize(
    ("form", "scored"),
    [
        ({}, 2 * (32 + 32)),
        ({"num_query_groups": 2}, 2 * (32 + 32)),
        (DEEPSEEK, (2 + 2) * 4 * ((8 + 4) + 6)),
        ({"window_size": "3,0"}, 0),
    ],
    ids=str,
)
def test_causal_flops_have_half_of_attention(form: dict[str, Any], scored: int) -> None:
    """Claim (logging): model FLOPs in Megatron-LM's count have half of the products of queries with
    keys and of probabilities with values, and all others

    `scored` is the number of products that a token has with each other one. A window of four keys
    is shorter than half of the sample.
    """
    config = configuration(**form)
    spec = model_spec(config)
    tokens = config.seq_length
    left_out = spec.flops(tokens) - spec.flops(tokens, is_causal=True)
    assert left_out == 6 * tokens * scored * tokens // 2
    assert spec.flops(tokens, spec.after) == spec.flops(tokens, spec.after, is_causal=True)
