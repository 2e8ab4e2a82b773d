"""Selects the linear layers of a model that compute in fp8 in training.

Those of attention, of feed-forward layers and of experts do, in the selected transformer layers, if
they are large enough (`PrecisionConfig.rounds`). All else computes in the run's precision:
embeddings, norms, the attention core, routers, the layers of multi-token prediction and the output
layer.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from megatron_ds.config import PrecisionConfig
from megatron_ds.model.attention.self_attention import Attention
from megatron_ds.model.block import Block
from megatron_ds.model.experts.grouped import Experts
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.mlp import MLP
from megatron_ds.model.moe import MoE
from megatron_ds.parallel.fp8.grouped import Fp8Experts, Parts
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe, RoundedWeights
from megatron_ds.parallel.fp8.rounding import E4M3, E5M2, keep_trials_out_of_graphs
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear

Rounding = tuple[ColumnParallelLinear | RowParallelLinear, Fp8Linear]
"""A linear layer, and its product in fp8."""


def compute_in_fp8(model: GPTModel, precision: PrecisionConfig) -> None:
    """Let linear layers of a model compute in fp8, if the options request it.

    Args:
        model: The model, or a pipeline stage of it.
        precision: The options.
    """
    if precision.fp8_format is None:
        return
    gradients = gradient_format(precision)
    by_row = precision.fp8_recipe == "rowwise"
    recipe = Fp8Recipe(gradients, by_row, model.sequence_group, block=precision.fp8_block)
    selected = precision.fp8_layers(model.config.num_layers)
    for block in model.layers.values():
        if isinstance(block, Block) and block.layer in selected:
            _round_products(block, recipe, precision)


def gradient_format(precision: PrecisionConfig) -> torch.dtype:
    """The type of rounded gradients."""
    return E5M2 if precision.fp8_format == "hybrid" else E4M3


def recipe_of(model: nn.Module) -> Fp8Recipe | None:
    """How the layers of a model are rounded; None if no layer computes in fp8."""
    products = (getattr(module, "training_product", None) for module in model.modules())
    layers = (product for product in products if isinstance(product, (Fp8Linear, Fp8Experts)))
    return next((layer.recipe for layer in layers), None)


def rounded_weights(model: nn.Module) -> RoundedWeights | None:
    """The weights in fp8 of a model; None if no layer computes in fp8."""
    recipe = recipe_of(model)
    return None if recipe is None else recipe.weights


def trace_products(model: GPTModel) -> None:
    """Let the graphs of compiled layers contain the casts of activations and gradients.

    The weights are rounded before each layer, so a rank must then have all of them. Experts are in
    no graph.
    """
    keep_trials_out_of_graphs()
    for block in model.blocks():
        layers = [
            (module, module.training_product)
            for module in block.modules()
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
            if isinstance(module.training_product, Fp8Linear)
        ]
        block.register_forward_pre_hook(functools.partial(_prepare, layers))


def _prepare(layers: list[Rounding], block: nn.Module, inputs: object) -> None:
    if block.training:
        for layer, product in layers:
            product.prepare(layer.weight)


def _round_products(block: Block, recipe: Fp8Recipe, precision: PrecisionConfig) -> None:
    attention = block.attention
    mlp = block.mlp
    assert type(attention) is Attention, "other attention is refused"
    linear = [attention.qkv, attention.proj]
    dense: nn.Module | None = mlp
    if isinstance(mlp, MoE):
        dense = mlp.shared
        _round_experts(mlp.experts, recipe, precision)
    if dense is not None:
        assert type(dense) is MLP, "other feed-forward layers are refused"
        linear += [dense.fc_in, dense.fc_out]
    for layer in linear:
        if precision.rounds(*layer.full_shape):
            layer.training_product = Fp8Linear(recipe, layer.group, layer.sharded_dim)


def _round_experts(experts: Experts, recipe: Fp8Recipe, precision: PrecisionConfig) -> None:
    for layer, sharded in ((experts.fc_in, 1), (experts.fc_out, 2)):
        sizes = list(layer.shape)
        sizes[sharded] *= experts.group.size
        if precision.rounds(*sizes[1:]):
            layer.training_product = Fp8Experts(recipe, experts.group, sharded)
            experts.training_parts = functools.partial(Parts.of, recipe)
