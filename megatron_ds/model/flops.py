"""Floating-point operations and parameters, counted from the configuration.

Operations are those of matrix products only, a multiplication and an addition each; the causal mask
does not halve attention. This is Megatron's convention (Narayanan et al. 2021, section 5.1) without
its approximations.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from megatron_ds.config import ModelConfig, MoEConfig

DENSE = MoEConfig()


def model_flops_per_sample(config: ModelConfig, padded_vocab: int, moe: MoEConfig = DENSE) -> int:
    """Operations of one sample's forward and backward pass, without recomputation.

    Of a mixture of experts, those of the selected experts and of the router; tokens that experts
    drop are counted.

    Args:
        config: Architecture.
        padded_vocab: Rows of the output layer.
        moe: Which layers have experts, and how many.
    """
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.kv_heads * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)
    mlp = config.hidden_size * config.mlp_hidden_size * (3 if config.is_gated else 2)
    scores = 2 * config.seq_length * q_size  # of q k^T and softmax x v
    sparse = moe.num_moe_layers(config.num_layers)
    layers = config.num_layers * (attention + mlp + scores)
    layers += sparse * ((moe.moe_router_topk - 1) * mlp + config.hidden_size * moe.experts)
    # The backward pass has two products for each of the forward pass.
    return 3 * 2 * config.seq_length * (layers + config.hidden_size * padded_vocab)


def parameter_sizes(
    config: ModelConfig, tp_size: int, moe: MoEConfig = DENSE, ep_size: int = 1
) -> Counter[int]:
    """Elements of one model-parallel rank's parameters -> number of parameters of this size.

    The padding of the vocabulary is included.

    Args:
        config: Architecture.
        tp_size: Tensor-parallel size.
        moe: Which layers have experts, and how many.
        ep_size: Expert-parallel size.
    """
    hidden = config.hidden_size
    qkv = config.head_dim * (config.num_attention_heads + 2 * config.kv_heads)
    table = config.padded_vocab(tp_size) // tp_size * hidden
    norm_vectors = 1 if config.normalization == "RMSNorm" else 2
    sizes: Counter[int] = Counter()
    sizes[hidden * qkv // tp_size] += config.num_layers
    sizes[config.num_attention_heads * config.head_dim * hidden // tp_size] += config.num_layers
    sizes[qkv // tp_size] += config.num_layers * config.qkv_bias
    sizes[hidden] += config.num_layers * (2 * norm_vectors + config.add_bias_linear)
    sizes[hidden] += norm_vectors * (1 + config.embed_layernorm)
    sizes[table] += 1 + config.untie_embeddings_and_output_weights
    if config.position_embedding_type == "learned_absolute":
        sizes[config.num_positions * hidden] += 1
    sparse = moe.num_moe_layers(config.num_layers)
    _add_mlps(sizes, config, tp_size, config.num_layers - sparse, stacked=1)
    _add_mlps(sizes, config, tp_size, sparse, stacked=moe.experts // ep_size)
    sizes[moe.experts * hidden] += sparse
    return sizes


def matrix_parameters(
    config: ModelConfig, tp_size: int, moe: MoEConfig = DENSE, ep_size: int = 1
) -> Counter[int]:
    """As `parameter_sizes`, but of the matrices of the transformer layers only."""
    without_bias = dataclasses.replace(config, add_bias_linear=False, add_qkv_bias=False)
    one, none = (
        parameter_sizes(dataclasses.replace(without_bias, num_layers=layers), tp_size, moe, ep_size)
        for layers in (config.num_layers, 0)
    )
    sizes = one - none
    norms = config.num_layers * (2 if config.normalization == "RMSNorm" else 4)
    return sizes - Counter({config.hidden_size: norms})


def _add_mlps(
    sizes: Counter[int], config: ModelConfig, tp_size: int, layers: int, stacked: int
) -> None:
    """Add the MLPs of some layers, each the stacked weights of so many."""
    hidden, width = config.hidden_size, config.mlp_hidden_size
    fc_in = width * (2 if config.is_gated else 1)
    sizes[stacked * hidden * fc_in // tp_size] += layers
    sizes[stacked * hidden * width // tp_size] += layers
    sizes[stacked * fc_in // tp_size] += layers * config.add_bias_linear
    sizes[stacked * hidden] += layers * config.add_bias_linear


def expert_parameters_per_rank(
    config: ModelConfig, tp_size: int, moe: MoEConfig, ep_size: int
) -> int:
    """Parameters of the experts of one model-parallel rank."""
    sizes: Counter[int] = Counter()
    sparse = moe.num_moe_layers(config.num_layers)
    _add_mlps(sizes, config, tp_size, sparse, stacked=moe.experts // ep_size)
    return _total(sizes)


def parameters_per_rank(
    config: ModelConfig, tp_size: int, moe: MoEConfig = DENSE, ep_size: int = 1
) -> int:
    """Parameters of one model-parallel rank, including the padding of the vocabulary."""
    return _total(parameter_sizes(config, tp_size, moe, ep_size))


def _total(sizes: Counter[int]) -> int:
    return sum(size * count for size, count in sizes.items())
