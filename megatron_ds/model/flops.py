"""Floating-point operations of a training step, counted from the configuration.

Matrix products only, a multiplication and an addition each; attention is counted whole, not halved
for the causal mask. That is the forks' convention (Narayanan et al. 2021, section 5.1) without its
approximations.
"""

from __future__ import annotations

from megatron_ds.config import ModelConfig


def model_flops_per_sample(config: ModelConfig, padded_vocab: int) -> int:
    """Forward and backward pass of one sample, in operations.

    What the model needs, whatever is recomputed. padded_vocab: rows of the output layer.
    """
    return 3 * (_transformer_layers(config) + _head(config, padded_vocab))


def hardware_flops_per_sample(
    config: ModelConfig, padded_vocab: int, granularity: str | None
) -> int:
    """The same with what the machine does again: granularity is that of the recomputation."""
    again = {
        None: 0,
        "full": _transformer_layers(config),
        "selective": config.num_layers * _attention_scores(config),
    }
    return model_flops_per_sample(config, padded_vocab) + again[granularity]


def _transformer_layers(config: ModelConfig) -> int:
    """Forward pass of all layers."""
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.kv_heads * config.head_dim
    attention = config.hidden_size * (2 * q_size + 2 * kv_size)
    mlp = config.hidden_size * config.mlp_hidden_size * (3 if config.is_gated else 2)
    return config.num_layers * (
        2 * config.seq_length * (attention + mlp) + _attention_scores(config)
    )


def _attention_scores(config: ModelConfig) -> int:
    """Forward pass of one layer's scores and weighted values."""
    return 4 * config.seq_length * config.seq_length * config.num_attention_heads * config.head_dim


def _head(config: ModelConfig, padded_vocab: int) -> int:
    return 2 * config.seq_length * config.hidden_size * padded_vocab


def parameters_per_rank(config: ModelConfig, tp_size: int) -> int:
    """Parameters of one tensor-parallel rank, with the padding of the vocabulary."""
    hidden = config.hidden_size
    norm = hidden * (1 if config.normalization == "RMSNorm" else 2)
    qkv = config.head_dim * (config.num_attention_heads + 2 * config.kv_heads)
    fc_in = config.mlp_hidden_size * (2 if config.is_gated else 1)
    cut = (
        qkv + fc_in + config.mlp_hidden_size + config.num_attention_heads * config.head_dim
    ) * hidden
    cut += qkv * config.qkv_bias + fc_in * config.add_bias_linear
    layer = cut // tp_size + 2 * norm + 2 * hidden * config.add_bias_linear
    tables = config.padded_vocab(tp_size) // tp_size * hidden
    if config.untie_embeddings_and_output_weights:
        tables *= 2
    if config.position_embedding_type == "learned_absolute":
        tables += config.num_positions * hidden
    return tables + config.num_layers * layer + norm * (1 + config.embed_layernorm)
