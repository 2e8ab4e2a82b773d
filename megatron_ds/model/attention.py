"""Causal self-attention with cut heads: project, rotate, attend, project.

Shapes: S sequence, B micro-batch, H hidden, n this rank's query heads, k its key-value heads, D
head size, L keys (those of the cache included).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend

from megatron_ds.config import ModelConfig
from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.model.position_embedding import AttentionContext, rotate
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams


def describe_kernel(
    config: ModelConfig,
    micro_batch: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
    documents: PackingOptions | None = None,
) -> str:
    """What computes a training step's attention, and which of its kernels torch takes for that."""
    per_document = documents is not None and documents.reset_attention
    if documents is not None and per_document and documents.flex is not None:
        return "torch's flex_attention, over what a document needs"
    choice = _sdpa_backend(config, 1 if per_document else micro_batch, tp_size, dtype, device)
    how = " per document" if per_document else ""
    return f"torch's scaled_dot_product_attention{how}: {choice}"


def _sdpa_backend(
    config: ModelConfig, batch: int, tp_size: int, dtype: torch.dtype, device: torch.device
) -> str:
    """The kernel behind scaled_dot_product_attention, in a word."""
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
    except (AttributeError, RuntimeError, TypeError):  # it is not among torch's public functions
        return "torch's choice"
    return str(SDPBackend(choice)).rpartition(".")[2].removesuffix("_ATTENTION").lower()


class KeyValueCache(Protocol):
    """Keys and values of the tokens that a generator has already fed."""

    @property
    def length(self) -> int:
        """Tokens stored before this forward pass; read once, before the first layer."""
        ...

    def update(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, k, S, D] keys and values of a layer; return all of them, [B, k, L, D]."""
        ...


class Attention(nn.Module):
    """[S, B, H] to [S, B, H]."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        group: Group,
        rng: RngStreams,
        init: Initializer,
        recompute: ActivationCheckpointing | None,
    ) -> None:
        """layer: number from 0. recompute: given if it is this attention's core that is to be
        recomputed.
        """
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.rng = rng
        self.recompute = recompute
        self.grouped = config.kv_heads != config.num_attention_heads
        q_size, kv_size = (
            config.num_attention_heads * config.head_dim,
            config.kv_heads * config.head_dim,
        )
        self.local_sizes = [size // group.size for size in (q_size, kv_size, kv_size)]
        name, std = f"layers.{layer}.attention", config.init_method_std
        self.qkv = ColumnParallelLinear(
            config.hidden_size,
            (q_size, kv_size, kv_size),
            bias=config.qkv_bias,
            group=group,
            init=init.normal(f"{name}.qkv.weight", std),
        )
        self.proj = RowParallelLinear(
            q_size,
            config.hidden_size,
            bias=config.add_bias_linear,
            group=group,
            init=init.normal(f"{name}.proj.weight", std / (2.0 * config.num_layers) ** 0.5),
        )

    def forward(
        self, x_SBH: torch.Tensor, context: AttentionContext, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        q, k, v = (self._heads(part) for part in self.qkv(x_SBH).split(self.local_sizes, dim=-1))
        if context.rotation is not None:
            q, k = rotate(q, context.rotation), rotate(k, context.rotation)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        attended_BnSD = self._attention_core(q, k, v, context)
        out_SBH: torch.Tensor = self.proj(attended_BnSD.permute(2, 0, 1, 3).flatten(2))
        return out_SBH

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, n x D] to [S, B, n, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def _attention_core(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if self.training and self.dropout > 0.0:
                dropped: torch.Tensor = self._attend_with_dropout(q, k, v, context)
                return dropped
            if context.documents is not None:
                inside: torch.Tensor = self._attend_in_documents(q, k, v, context)
                return inside
            return self._attend(q, k, v, context, 0.0)

        return core(q, k, v) if self.recompute is None else self.recompute.run(core, q, k, v)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_with_dropout(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        # The heads are cut over the ranks, so each rank draws its own mask.
        with self.rng.fork_tp_rng():
            return self._attend(q, k, v, context, self.dropout)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_in_documents(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        # Every micro-batch has documents of other lengths, each of which would be compiled for.
        return self._attend(q, k, v, context, 0.0)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: AttentionContext,
        dropout: float,
    ) -> torch.Tensor:
        if context.documents is not None:
            return context.documents.attend(q, k, v, dropout)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=context.bias,
            dropout_p=dropout,
            is_causal=context.is_causal,
            enable_gqa=self.grouped,
        )
