"""Causal self-attention with heads sharded over the tensor-parallel group.

Owns the projections and the random stream of attention dropout. How positions and masks act comes
in with the `AttentionContext`.

Shapes: S sequence, B micro-batch, H hidden, n this rank's query heads, k its key-value heads, D
head size, L keys (those of the cache included).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention_cores import AttentionCore
from megatron_ds.model.position_embedding import AttentionContext, rotate
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams


class KeyValueCache(Protocol):
    """Keys and values of the tokens that a generator has already fed."""

    @property
    def length(self) -> int:
        """Tokens stored before this forward pass; read once, before the first layer."""
        ...

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, k, S, D] keys and values of a layer; return all of them, [B, k, L, D]."""
        ...


class Attention(nn.Module):
    """Project, rotate, attend, project: [S, B, H] to [S, B, H].

    Args:
        config: Architecture.
        layer: Number of the layer, from 0.
        group: Tensor-parallel group over which the heads are sharded.
        rng: Random streams; dropout draws from the sharded one.
        init: Draws the initial weights.
        checkpointing: Recomputes the attention core (selective recomputation). None: it is stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        group: Group,
        rng: RngStreams,
        init: Initializer,
        checkpointing: ActivationCheckpointing | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.attention_dropout
        self.rng = rng
        self.checkpointing = checkpointing
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
        self, x_SBH: Tensor, context: AttentionContext, cache: KeyValueCache | None = None
    ) -> Tensor:
        q, k, v = (self._heads(part) for part in self.qkv(x_SBH).split(self.local_sizes, dim=-1))
        if context.rotation is not None:
            q, k = rotate(q, context.rotation), rotate(k, context.rotation)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        attended_BnSD = self._attend(q, k, v, context.core)
        out_SBH: Tensor = self.proj(attended_BnSD.permute(2, 0, 1, 3).flatten(2))
        return out_SBH

    def _heads(self, x: Tensor) -> Tensor:
        """[S, B, n x D] to [S, B, n, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.training and self.dropout > 0.0:
                dropped: Tensor = self._attend_with_dropout(q, k, v, core)
                return dropped
            return core.attend(q, k, v, 0.0)

        if self.checkpointing is None:
            return attend(q, k, v)
        return self.checkpointing.run(attend, q, k, v)

    # Random states cannot be exchanged inside a compiled graph.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attend_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, core: AttentionCore) -> Tensor:
        # The heads are sharded over the ranks, so each rank draws its own mask.
        with self.rng.fork_tp_rng():
            return core.attend(q, k, v, self.dropout)
