"""One transformer layer, normalised before each part (pre-norm)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention import Attention, KeyValueCache
from megatron_ds.model.mlp import MLP
from megatron_ds.model.norm import build_norm
from megatron_ds.model.position_embedding import AttentionContext
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [S, B, H] to [S, B, H]."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        group: Group,
        rng: RngStreams,
        init: Initializer,
        recompute_core: ActivationCheckpointing | None,
    ) -> None:
        """layer: number from 0. recompute_core: given if the attention core is to be recomputed."""
        super().__init__()
        self.dropout = config.hidden_dropout
        self.attention_norm = build_norm(config)
        self.attention = Attention(
            config, layer, group=group, rng=rng, init=init, recompute=recompute_core
        )
        self.mlp_norm = build_norm(config)
        self.mlp = MLP(config, layer, group=group, init=init)

    def forward(
        self, x_SBH: torch.Tensor, context: AttentionContext, cache: KeyValueCache | None = None
    ) -> torch.Tensor:
        x = x_SBH + self._drop(self.attention(self.attention_norm(x_SBH), context, cache))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        # Whole on every tensor-parallel rank, so the mask is that of the replicated stream.
        return F.dropout(x, self.dropout, training=self.training) if self.dropout > 0.0 else x
