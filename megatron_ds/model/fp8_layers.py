"""Selects the linear layers of a model that compute in fp8 in training.

Those of attention and of dense feed-forward layers do, in the selected transformer layers. All else
computes in the run's precision: embeddings, norms, the attention core, the layers of multi-token
prediction and the output layer.
"""

from __future__ import annotations

from megatron_ds.config import PrecisionConfig
from megatron_ds.model.attention.self_attention import Attention
from megatron_ds.model.block import Block
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.mlp import MLP
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe, RoundedWeights
from megatron_ds.parallel.fp8.rounding import E4M3, E5M2


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
    recipe = Fp8Recipe(gradients, by_row, model.sequence_group)
    selected = precision.fp8_layers(model.config.num_layers)
    for block in model.layers.values():
        if isinstance(block, Block) and block.layer in selected:
            _round_products(block, recipe)


def rounded_weights(model: GPTModel) -> RoundedWeights | None:
    """The weights in fp8 of a model; None if no layer computes in fp8."""
    products = (getattr(module, "training_product", None) for module in model.modules())
    layers = (product for product in products if isinstance(product, Fp8Linear))
    return next((layer.recipe.weights for layer in layers), None)


def _round_products(block: Block, recipe: Fp8Recipe) -> None:
    attention = block.attention
    mlp = block.mlp
    assert type(attention) is Attention, "other attention is refused"
    assert type(mlp) is MLP, "other feed-forward layers are refused"
    for layer in (attention.qkv, attention.proj, mlp.fc_in, mlp.fc_out):
        layer.training_product = Fp8Linear(recipe, layer.group, layer.sharded_dim)
