"""One transformer layer with pre-normalization."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention import Attention, KeyValueCache
from megatron_ds.model.norm import build_norm
from megatron_ds.model.position_embedding import AttentionContext
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import RngStreams


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [S, B, H] to [S, B, H].

    Args:
        config: Architecture.
        layer: Number of the layer, from 0.
        group: Tensor-parallel group.
        rng: Random streams of dropout.
        init: Draws the initial weights.
        mlp: The feed-forward layer, [S, B, H] to [S, B, H].
        checkpoint_core: Recomputes the attention core. None: it is stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        group: Group,
        rng: RngStreams,
        init: Initializer,
        mlp: nn.Module,
        checkpoint_core: ActivationCheckpointing | None,
    ) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.attention_norm = build_norm(config)
        self.attention = Attention(
            config, layer, group=group, rng=rng, init=init, checkpointing=checkpoint_core
        )
        self.mlp_norm = build_norm(config)
        self.mlp = mlp

    def forward(
        self, x_SBH: Tensor, context: AttentionContext, cache: KeyValueCache | None = None
    ) -> Tensor:
        x = x_SBH + self._drop(self.attention(self.attention_norm(x_SBH), context, cache))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        # Every tensor-parallel rank has all of x, so the mask is that of the replicated stream.
        return F.dropout(x, self.dropout, training=self.training) if self.dropout > 0.0 else x
