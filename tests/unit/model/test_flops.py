"""Counted operations, compared with those of the model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.model.spec.architecture import model_spec
from tests.tables import tables
from tests.unit.model.dense import TINY, build_model

TABLES = tables(__file__)

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
DEEPSEEK: dict[str, Any] = TABLES["deepseek"]


@pytest.mark.parametrize("form", [*FORMS, DEEPSEEK], ids=str)
@pytest.mark.parametrize("moe", [MoEConfig(), EXPERTS], ids=["dense", "experts"])
def test_model_flops_are_those_that_torch_counts(form: dict[str, Any], moe: MoEConfig) -> None:
    """Claim (logging): model TFLOP/s agree with torch's count"""
    config = configuration(**form)
    if moe.is_used:  # the gradients of their biases are products, too
        config = dataclasses.replace(config, add_bias_linear=False)
    counted = BATCH * model_spec(config, moe).flops(config.seq_length)
    assert counted == pytest.approx(measured_flops(config, moe), rel=0.01)
