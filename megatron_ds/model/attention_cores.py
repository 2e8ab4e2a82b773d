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
from torch import Tensor

from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.ulysses import gather_heads, gather_sequence

SHORT = 512
"""Positions up to which a compiled graph on a CPU stores all scores in bf16. torch's kernel, which
does not store them, takes up to twice the time there."""


class AttentionCore(Protocol):
    """softmax(q k^T / sqrt(D) + mask) v."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Compute causal attention.

        Args:
            q: Queries [B, n, S, D].
            k: Keys [B, k, L, D]; each serves n / k query heads. Those of a cache may be of a wider
                type than the queries.
            v: Values [B, k, L, D].
            dropout: Probability with which a weight of the softmax is dropped.

        Returns:
            [B, n, S, D].
        """
        ...


@dataclass(frozen=True)
class SDPA:
    """torch's scaled_dot_product_attention."""

    bias: Tensor | None = None
    """Broadcasts to [B, n, S, L]. Floating point: added to the scores, -inf where a key is hidden.
    bool: where a key is visible. None: every key is visible to every query."""
    is_causal: bool = False
    """Hides later keys; needs as many keys as queries and no bias. torch then chooses a kernel that
    leaves out what the mask hides."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        bias, has_groups = self.bias, q.shape[1] != k.shape[1]
        if bias is not None and bias.dim() == 3:
            # With three dimensions, torch selects the kernel that stores all scores on a CPU.
            bias = bias.unsqueeze(0)
        if bias is not None and has_groups and q.device.type != "cpu":
            # Elsewhere it selects that kernel for grouped queries with a bias.
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            has_groups = False
        if k.dtype != q.dtype:
            bias = bias if bias is None or bias.dtype == torch.bool else bias.to(k.dtype)
            core = SDPA(bias, self.is_causal)
            return core.attend(q.to(k.dtype), k, v, dropout).to(q.dtype)
        if self.is_causal and dropout == 0.0 and _prefers_scores(q):
            return _attend_by_scores(q, k, v)
        return F.scaled_dot_product_attention(
            q, k, v, bias, dropout, self.is_causal, enable_gqa=has_groups
        )


@dataclass(frozen=True)
class UlyssesAttention:
    """Attention on a slice of the sequence, by a core that sees all of it for some of the heads.

    S and L are those of the slice.
    """

    core: AttentionCore
    """Of the complete sequence and this rank's heads."""
    group: Group
    """Sequence-parallel group."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        q, k, v = gather_sequence(q, k, v, self.group)
        return gather_heads(self.core.attend(q, k, v, dropout), self.group)


def _prefers_scores(q: Tensor) -> bool:
    is_short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT
    return is_short and torch.compiler.is_compiling()


def _attend_by_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in operations between whose matrix products torch.compile makes one kernel.

    Softmax is computed in fp32 and rounded once.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    position = torch.arange(q.shape[2], device=q.device)
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(position > position.unsqueeze(1), -torch.inf)
    attended: Tensor = scores.softmax(-1).to(q.dtype) @ v
    return attended
