"""Counted operations and parameters, compared with those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ds.config import ModelConfig
from megatron_ds.model.flops import model_flops_per_sample, parameters_per_rank
from tests.unit.model.dense import TINY, build_model

BATCH = 2


def measured_flops(config: ModelConfig) -> int:
    """Operations of one forward and backward pass, as torch counts them."""
    model = build_model(config)
    tokens = torch.randint(0, config.vocab_size, (BATCH, config.seq_length))
    # The flash kernel's backward recomputes the scores; plain products count what the model needs.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).loss_sum.backward()
    return counter.get_total_flops()


def configuration(**changes: Any) -> ModelConfig:
    return ModelConfig(**TINY, seq_length=16, vocab_size=128, **changes)


@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("untied", [False, True])
def test_model_flops_are_those_that_torch_counts(
    groups: int | None, activation: str, untied: bool
) -> None:
    tying = {"untie_embeddings_and_output_weights": untied}
    config = configuration(num_query_groups=groups, activation=activation, **tying)
    counted = BATCH * model_flops_per_sample(config, config.padded_vocab(1))
    assert counted == pytest.approx(measured_flops(config), rel=0.01)


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
def test_parameter_count_is_that_of_the_model(changes: dict[str, object]) -> None:
    config = configuration(**changes)
    model = build_model(config)
    assert parameters_per_rank(config, 1) == sum(p.numel() for p in model.parameters())
