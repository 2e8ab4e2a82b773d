"""The largest attention logit of each head, by a product of queries and keys of its own.

Kernels of attention do not return their scores. Shapes: B micro-batch, S queries and keys, n this
rank's query heads, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.model.attention.cores import SCORES_AT_ONCE, AttentionCore, UlyssesAttention
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.parallel.collectives import all_gather
from megatron_ds.parallel.context.slices import SequenceSlices, in_sequence_order
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.ulysses import local_slice


class LargestLogits:
    """The largest logit of each of a layer's heads since the last `take`.

    Logits are the scaled scores of a query and each visible key, before a soft cap and without a
    bias.

    Args:
        heads: Query heads of this tensor-parallel rank.
        sharing: Ranks of a sequence that see other heads of this tensor-parallel rank.
        cp: Ranks that have other queries and keys.
    """

    def __init__(self, heads: int, sharing: Group, cp: Group) -> None:
        self._heads = heads
        self._sharing = sharing
        self._cp = cp
        self._largest_n: Tensor | None = None

    def measuring(self, core: AttentionCore, rule: AttentionRule) -> AttentionCore:
        """A core that computes the same, and records the logits."""
        if isinstance(core, UlyssesAttention):
            return dataclasses.replace(core, core=_MeasuredAttention(core.core, rule, self))
        return _MeasuredAttention(core, rule, self)

    @torch.no_grad()
    def record(self, q: Tensor, k: Tensor, rule: AttentionRule) -> None:
        """Record the logits of this rank's heads and queries, [B, n, S, D]."""
        position = torch.arange(k.shape[2], device=q.device)
        own_position = position
        if (size := self._cp.size) > 1:
            slices = SequenceSlices.of(size * k.shape[2], self._cp)
            own_position = slices.positions(q.device)
            position = torch.arange(size * k.shape[2], device=q.device)
            k = in_sequence_order(torch.cat(list(all_gather(k, self._cp)), dim=2), 2, size)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
        at_once = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * len(position)))
        largest_n = self._largest_n
        if largest_n is None:
            largest_n = torch.full((self._heads,), -math.inf, device=q.device)
        local_n = largest_n[local_slice(self._heads, self._sharing)]
        for start in range(0, q.shape[2], at_once):
            distance = position - own_position[start : start + at_once, None]
            hidden = distance > 0
            if rule.window is not None:
                hidden |= distance <= -rule.window
            scores = (q[:, :, start : start + at_once] @ k).float()
            scores *= rule.scale or q.shape[-1] ** -0.5
            local_n.copy_(local_n.maximum(scores.masked_fill_(hidden, -math.inf).amax((0, 2, 3))))
        self._largest_n = largest_n

    def take(self, device: torch.device) -> Tensor:
        """The largest logits [n]; -inf for heads of other ranks, and if there are none."""
        largest_n = self._largest_n
        self._largest_n = None
        return (
            torch.full((self._heads,), -math.inf, device=device) if largest_n is None else largest_n
        )


@dataclass(frozen=True)
class _MeasuredAttention:
    core: AttentionCore
    rule: AttentionRule
    largest: LargestLogits

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        self.largest.record(q, k, self.rule)
        return self.core.attend(q, k, v, dropout, *sinks_n)
