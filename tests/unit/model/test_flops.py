"""Counted operations and parameters, compared with those of the model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.model.flops import (
    expert_parameters_per_rank,
    model_flops_per_sample,
    parameter_sizes,
    parameters_per_rank,
)
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
        model(tokens, tokens).loss_sum.backward()
    return counter.get_total_flops()


def configuration(**changes: Any) -> ModelConfig:
    return ModelConfig(**TINY, seq_length=16, vocab_size=128, **changes)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("moe", [MoEConfig(), EXPERTS], ids=["dense", "experts"])
def test_model_flops_are_those_that_torch_counts(
    groups: int | None, activation: str, untied: bool, moe: MoEConfig
) -> None:
    tying = {"untie_embeddings_and_output_weights": untied}
    config = configuration(num_query_groups=groups, activation=activation, **tying)
    if moe.is_used:  # the gradients of their biases are products, too
        config = dataclasses.replace(config, add_bias_linear=False)
    counted = BATCH * model_flops_per_sample(config, config.padded_vocab(1), moe)
    assert counted == pytest.approx(measured_flops(config, moe), rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 2, "activation": "swiglu", "position_embedding_type": "rope"},
        {"normalization": "RMSNorm", "add_bias_linear": False, "embed_layernorm": True},
        {"add_bias_linear": False, "add_qkv_bias": True},
        {"untie_embeddings_and_output_weights": True, "max_position_embeddings": 40},
    ],
)
@pytest.mark.parametrize("moe", [MoEConfig(), EXPERTS], ids=["dense", "experts"])
def test_parameter_count_is_that_of_the_model(changes: dict[str, object], moe: MoEConfig) -> None:
    config = configuration(**changes)
    model = build_model(config, moe=moe)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert parameters_per_rank(config, 1, moe) == sum(sizes.values())
    assert parameter_sizes(config, 1, moe) == Counter(sizes.values())
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert expert_parameters_per_rank(config, 1, moe, 1) == experts
    halves = parameters_per_rank(config, 1, moe, 2)
    assert halves == sum(sizes.values()) - experts // 2
