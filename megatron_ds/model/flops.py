"""Floating-point operations and parameters, counted from the configuration.

Operations are those of matrix products only, a multiplication and an addition each; the causal mask
does not halve attention. This is Megatron's convention (Narayanan et al. 2021, section 5.1) without
its approximations.
"""

from __future__ import annotations

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


def parameters_per_rank(config: ModelConfig, tp_size: int) -> int:
    """Parameters of one tensor-parallel rank, including the padding of the vocabulary."""
    hidden = config.hidden_size
    norm = hidden * (1 if config.normalization == "RMSNorm" else 2)
    qkv = config.head_dim * (config.num_attention_heads + 2 * config.kv_heads)
    fc_in = config.mlp_hidden_size * (2 if config.is_gated else 1)
    sharded = (
        qkv + fc_in + config.mlp_hidden_size + config.num_attention_heads * config.head_dim
    ) * hidden
    sharded += qkv * config.qkv_bias + fc_in * config.add_bias_linear
    layer = sharded // tp_size + 2 * norm + 2 * hidden * config.add_bias_linear
    tables = config.padded_vocab(tp_size) // tp_size * hidden
    if config.untie_embeddings_and_output_weights:
        tables *= 2
    if config.position_embedding_type == "learned_absolute":
        tables += config.num_positions * hidden
    return tables + config.num_layers * layer + norm * (1 + config.embed_layernorm)
