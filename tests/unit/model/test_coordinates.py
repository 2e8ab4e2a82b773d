"""Coordinate check of muP: sizes of activations after five steps of models of several sizes.

Each model is trained on one batch by the package's own optimizer and parameter groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig, OptimizerConfig
from megatron_ds.engine.optimizers.adamw import AdamW
from megatron_ds.engine.optimizers.param_groups import parameter_groups, set_lr_and_weight_decay
from megatron_ds.model.declaration.rates import multiplier_rule
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

BASE_WIDTH = 64
BASE_DEPTH = 2
HEAD = 16
STEPS = 5
LR = 0.01
SHAPE: dict[str, Any] = {
    "seq_length": 32,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.05,
    "untie_embeddings_and_output_weights": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
WIDTH_ALONE = {
    "use_mup": True,
    "mup_base_hidden_size": BASE_WIDTH,
    "mup_base_head_dim": float(HEAD),
}
BOTH = {**WIDTH_ALONE, "mup_base_num_layers": BASE_DEPTH}


def sizes(width: int, depth: int, **options: Any) -> dict[str, float]:
    """Mean absolute values of the hidden states in the middle and at the end, and of the logits."""
    config = ModelConfig(
        num_layers=depth,
        hidden_size=width,
        num_attention_heads=width // HEAD,
        **SHAPE,
        **options,
    )
    adam = OptimizerConfig(lr=LR, adam_beta2=0.95)
    model = GPTModel(config, mesh=Mesh.single(), rng=RngStreams(0), seed=3)
    groups, factors = parameter_groups(model, 0.0, multiplier_rule(adam, config), adam.adam_eps)
    optimizer = AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=adam.adam_eps)
    set_lr_and_weight_decay(optimizer.param_groups, factors, LR, 0.0)
    tokens = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:]).weighted(None)[0].backward()
        optimizer.step()
    measured: dict[str, float] = {}

    def measure(name: str, tensor: Tensor) -> None:
        measured[name] = tensor.abs().mean().item()

    blocks = model.blocks()
    for name, block in (("middle", blocks[depth // 2 - 1]), ("last", blocks[-1])):
        block.register_forward_hook(lambda *values, name=name: measure(name, values[-1]))
    with torch.no_grad():
        measure("logits", model(tokens[:, :-1]))
    return measured


def largest_ratio(*models: dict[str, float]) -> float:
    """By how much a size differs among models, at most."""
    columns = ([model[name] for model in models] for name in models[0])
    return max(max(values) / min(values) for values in columns)


def test_activations_of_all_widths_have_one_size() -> None:
    """Claim (precision): with muP, hidden states and logits after five steps have the same size
    within a factor of 2 at widths from 64 to 1,024; without it they do not at 256"""
    base, wide = (sizes(width, BASE_DEPTH) for width in (BASE_WIDTH, 256))
    assert largest_ratio(base, wide) > 4
    transferred = [sizes(width, BASE_DEPTH, **WIDTH_ALONE) for width in (BASE_WIDTH, 256, 1024)]
    assert transferred[0] == base  # at the base width, nothing changes
    assert largest_ratio(*transferred) < 2


def test_activations_of_all_depths_have_one_size() -> None:
    """Claim (precision): with `--mup-base-num-layers` they do at depths from 2 to 16; with transfer
    over widths alone they do not"""
    base = sizes(BASE_WIDTH, BASE_DEPTH, **BOTH)
    assert largest_ratio(base, *(sizes(BASE_WIDTH, depth, **BOTH) for depth in (4, 16))) < 2
    assert largest_ratio(base, sizes(BASE_WIDTH, 16, **WIDTH_ALONE)) > 4
