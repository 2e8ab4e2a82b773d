"""Attention cores: causal attention from queries, keys and values, one class per kind of mask.

Owns the calls of torch's attention kernels. Knows no projections, no positions and no random
streams: a caller that wants dropout has chosen the stream it is drawn from. Cores that end
attention at document boundaries are in `packed_attention`.

Shapes: B micro-batch, S queries, L keys, n this rank's query heads, k its key-value heads, D head
size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F


class AttentionCore(Protocol):
    """softmax(q k^T / sqrt(D) + mask) v."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """Compute causal attention.

        Args:
            q: Queries [B, n, S, D].
            k: Keys [B, k, L, D]; each serves n / k query heads.
            v: Values [B, k, L, D].
            dropout: Probability with which a weight of the softmax is dropped.

        Returns:
            [B, n, S, D].
        """
        ...


@dataclass(frozen=True)
class CausalSDPA:
    """torch's scaled_dot_product_attention with its own causal mask; needs as many keys as queries.

    torch then chooses a kernel that leaves out what the mask hides.
    """

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


@dataclass(frozen=True)
class BiasSDPA:
    """torch's scaled_dot_product_attention with an explicit mask or bias (ALiBi, a KV cache)."""

    bias: torch.Tensor | None
    """Broadcasts to [B, n, S, L]. Floating point: added to the scores, -inf where a key is hidden.
    bool: where a key is visible. None: every key is visible to every query."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.bias,
            dropout_p=dropout,
            enable_gqa=q.shape[1] != k.shape[1],
        )
