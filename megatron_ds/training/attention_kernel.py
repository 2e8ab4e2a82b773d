"""Name of the attention kernel of a training step, for the start-up report."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend

from megatron_ds.config import ModelConfig
from megatron_ds.model.packed_attention import PackingOptions


def describe_kernel(
    config: ModelConfig,
    micro_batch: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
    packing: PackingOptions | None = None,
) -> str:
    """Name the function that computes attention, and the kernel that torch selects for it.

    Args:
        config: Architecture.
        micro_batch: Samples of a micro-batch.
        tp_size: Tensor-parallel size.
        dtype: Type of the activations.
        device: Device of the activations.
        packing: What happens at document boundaries.
    """
    per_document = packing is not None and packing.reset_attention
    if packing is not None and per_document and packing.flex is not None:
        return "torch's flex_attention within documents"
    backend = _sdpa_backend(config, 1 if per_document else micro_batch, tp_size, dtype, device)
    scope = " per document" if per_document else ""
    return f"torch's scaled_dot_product_attention{scope}: {backend}"


def _sdpa_backend(
    config: ModelConfig, batch: int, tp_size: int, dtype: torch.dtype, device: torch.device
) -> str:
    """Name of the kernel that scaled_dot_product_attention selects."""
    queries = config.seq_length

    def heads(count: int) -> torch.Tensor:
        shape = batch, count // tp_size, queries, config.head_dim
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)

    q, k = heads(config.num_attention_heads), heads(config.kv_heads)
    alibi = config.position_embedding_type == "alibi"
    bias = torch.empty(q.shape[1], queries, queries, dtype=dtype, device=device) if alibi else None
    try:
        choice = torch._fused_sdp_choice(
            q,
            k,
            k,
            attn_mask=bias,
            dropout_p=config.attention_dropout,
            is_causal=not alibi,
            enable_gqa=config.kv_heads != config.num_attention_heads,
        )
    except (AttributeError, RuntimeError, TypeError):  # not one of torch's public functions
        return "torch's choice"
    return str(SDPBackend(choice)).rpartition(".")[2].removesuffix("_ATTENTION").lower()
