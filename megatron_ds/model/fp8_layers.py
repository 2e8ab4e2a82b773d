"""Selects the linear layers of a model that compute in fp8 in training.

Those of attention, of feed-forward layers and of experts do, in the selected transformer layers, if
they are large enough (`PrecisionConfig.rounds`). All else computes in the run's precision:
embeddings, norms, the attention core, routers, the layers of multi-token prediction and the output
layer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron_ds.config import PrecisionConfig
from megatron_ds.config.problems import Problem
from megatron_ds.model.attention.self_attention import Attention
from megatron_ds.model.block import Block
from megatron_ds.model.experts.grouped import Experts
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.kernels.elementwise import compilation_problem
from megatron_ds.model.mlp import MLP
from megatron_ds.model.moe import MoE
from megatron_ds.parallel.fp8.grouped import Fp8Experts
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe, RoundedWeights
from megatron_ds.parallel.fp8.rounding import (
    E4M3,
    E5M2,
    keep_trials_out_of_graphs,
    round_both,
    round_stack_both,
    round_weight,
)
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
    gradients = E5M2 if precision.fp8_format == "hybrid" else E4M3
    by_row = precision.fp8_recipe == "rowwise"
    recipe = Fp8Recipe(gradients, by_row, model.sequence_group, block=precision.fp8_block)
    selected = precision.fp8_layers(model.config.num_layers)
    for block in model.layers.values():
        if isinstance(block, Block) and block.layer in selected:
            _round_products(block, recipe, precision)


def recipe_of(model: nn.Module) -> Fp8Recipe | None:
    """How the layers of a model are rounded; None if no layer computes in fp8."""
    products = (getattr(module, "training_product", None) for module in model.modules())
    layers = (product for product in products if isinstance(product, (Fp8Linear, Fp8Experts)))
    return next((layer.recipe for layer in layers), None)


def rounded_weights(model: nn.Module) -> RoundedWeights | None:
    """The weights in fp8 of a model; None if no layer computes in fp8."""
    recipe = recipe_of(model)
    return None if recipe is None else recipe.weights


def compile_rounding(
    recipe: Fp8Recipe, device: torch.device, *, lengths_vary: bool, has_experts: bool
) -> Problem | None:
    """Compile the casts to fp8 if they then round as eager ones.

    Compiles the casts of linear layers' activations and gradients, and of weights kept for a step.

    Args:
        recipe: The recipe of a model, which is changed.
        device: Device of the activations.
        lengths_vary: Compile for all numbers of tokens, not for each one.
        has_experts: Whether to compile the casts of the experts' weights, too.

    Returns:
        Why the casts stay eager.
    """
    both = torch.compile(round_both, dynamic=None if lengths_vary else False)
    weight = torch.compile(round_weight, dynamic=False)
    stack = torch.compile(round_stack_both, dynamic=False)

    def results() -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(512, 512, generator=generator, device=device).pow(3).bfloat16()
        for dtype in dict.fromkeys((E4M3, recipe.gradients)):
            options = x, dtype, recipe.by_row, recipe.block
            yield both(*options), round_both(*options)
        of_weight = x, recipe.by_row, recipe.block
        yield weight(*of_weight), round_weight(*of_weight)
        if has_experts:
            of_stack = x.view(4, 128, 512), recipe.by_row
            yield stack(*of_stack), round_stack_both(*of_stack)

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for compiled, eager in results():
            yield from (
                (one.float(), other.float()) for one, other in zip(compiled, eager, strict=True)
            )

    problem = compilation_problem(pairs)
    if problem is None:
        recipe.round_both = both
        recipe.round_weight = weight
        recipe.round_stack = stack
    return problem


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
