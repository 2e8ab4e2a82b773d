"""Floating-point operations and parameters, counted from the configuration.

Operations are those of matrix products only, a multiplication and an addition each; the causal mask
does not halve attention. This is Megatron's convention (Narayanan et al. 2021, section 5.1) without
its approximations.
"""

from __future__ import annotations

from collections import Counter

from megatron_ds.config import ModelConfig


def model_flops_per_sample(config: ModelConfig, padded_vocab: int) -> int:
    """Operations of one sample's forward and backward pass, without recomputation.

    Args:
        config: Architecture.
        padded_vocab: Rows of the output layer.
    """
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.kv_heads * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)
    mlp = config.hidden_size * config.mlp_hidden_size * (3 if config.is_gated else 2)
    scores = 2 * config.seq_length * q_size  # of q k^T and softmax x v
    layers = config.num_layers * (attention + mlp + scores)
    # The backward pass has two products for each of the forward pass.
    return 3 * 2 * config.seq_length * (layers + config.hidden_size * padded_vocab)


def parameter_sizes(config: ModelConfig, tp_size: int) -> Counter[int]:
    """Elements of one tensor-parallel rank's parameters -> number of parameters of this size.

    The padding of the vocabulary is included.
    """
    hidden, mlp = config.hidden_size, config.mlp_hidden_size
    qkv = config.head_dim * (config.num_attention_heads + 2 * config.kv_heads)
    fc_in = mlp * (2 if config.is_gated else 1)
    table = config.padded_vocab(tp_size) // tp_size * hidden
    norm_vectors = 1 if config.normalization == "RMSNorm" else 2
    sizes = matrix_parameters(config, tp_size)
    sizes[qkv // tp_size] += config.num_layers * config.qkv_bias
    sizes[fc_in // tp_size] += config.num_layers * config.add_bias_linear
    sizes[hidden] += config.num_layers * 2 * (norm_vectors + config.add_bias_linear)
    sizes[hidden] += norm_vectors * (1 + config.embed_layernorm)
    sizes[table] += 1 + config.untie_embeddings_and_output_weights
    if config.position_embedding_type == "learned_absolute":
        sizes[config.num_positions * hidden] += 1
    return sizes


def matrix_parameters(config: ModelConfig, tp_size: int) -> Counter[int]:
    """As `parameter_sizes`, but of the matrices of the transformer layers only."""
    hidden, mlp = config.hidden_size, config.mlp_hidden_size
    qkv = config.head_dim * (config.num_attention_heads + 2 * config.kv_heads)
    fc_in = mlp * (2 if config.is_gated else 1)
    sizes: Counter[int] = Counter()
    for inputs, outputs in (
        (hidden, qkv),
        (config.num_attention_heads * config.head_dim, hidden),
        (hidden, fc_in),
        (mlp, hidden),
    ):
        sizes[inputs * outputs // tp_size] += config.num_layers
    return sizes


def parameters_per_rank(config: ModelConfig, tp_size: int) -> int:
    """Parameters of one tensor-parallel rank, including the padding of the vocabulary."""
    return sum(size * count for size, count in parameter_sizes(config, tp_size).items())
