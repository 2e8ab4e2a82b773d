"""Attention cores: causal attention from queries, keys and values, one class per kind of mask.

Owns the calls of torch's scaled_dot_product_attention, and the order in which its kernels are
considered: one that cannot compute a call is passed over for the next one. On a CPU torch chooses.
Knows no projections, no positions and no random streams: a caller that wants dropout has chosen the
stream it is drawn from. Cores that end attention at document boundaries are in `packed_attention`.

Shapes: B micro-batch, S queries, L keys, n this rank's query heads, k its key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from megatron_ds.config.devices import is_host
from megatron_ds.model.attention.rule import PLAIN, AttentionRule
from megatron_ds.parallel.context.slices import in_rank_order, in_sequence_order
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.ulysses import gather_heads, gather_sequence, local_slice

KEY_BLOCK = 64
QUERY_BLOCK = 8
"""Block sizes of keys and queries in the matmuls of `EagerAttention`. With other sizes CPU kernels
add in another order."""
SCORES_AT_ONCE = 2**24
"""Number of scores that `EagerAttention` has in memory."""
SHORT = 512
"""Positions up to which a compiled graph on a CPU stores all scores in bf16. torch's kernel, which
does not store them, takes up to twice the time there."""


BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "overrideable": SDPBackend.OVERRIDEABLE,
}
"""Kernels by name, the fastest ones first. The last one belongs to a device outside of torch."""
Order = tuple[SDPBackend, ...]
FIXED_SIZES: Order = tuple(BACKENDS.values())
VARYING_SIZES: Order = FIXED_SIZES[1:]
"""Kernels for inputs of varying sizes: all but cuDNN's, which takes tens of milliseconds to build a
plan for each new number of queries and keys."""


def order_of(choice: str, *, sizes_vary: bool) -> Order:
    """The kernels to consider for a value of --attention-backend."""
    if choice != "auto":
        return (BACKENDS[choice],)
    return VARYING_SIZES if sizes_vary else FIXED_SIZES


def name_of(backend: SDPBackend) -> str:
    """A kernel's name in `BACKENDS`."""
    return next(name for name, value in BACKENDS.items() if value == backend)


def backends_in_order(order: Order, device: torch.device) -> AbstractContextManager[object]:
    """Within it, torch considers these kernels only, in this order; all of them if it is empty."""
    if not order or is_host(device.type):
        return nullcontext()
    return sdpa_kernel(list(order), set_priority=True)


class AttentionCore(Protocol):
    """softmax(q k^T / sqrt(D) + mask) v, or as another `AttentionRule` has it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        """Compute causal attention.

        Args:
            q: Queries [B, n, S, D].
            k: Keys [B, k, L, D]; each serves n / k query heads. Cached ones may be of a wider type
                than the queries.
            v: Values [B, k, L, D].
            dropout: Probability with which a weight of the softmax is dropped.
            sinks_n: The logit of each head, of rules with sinks.

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
    backends: Order = ()
    """Kernels to consider on a device. Empty: those that the caller has selected."""
    scale: float | None = None
    """Scale of the scores from the rule; None for 1 / sqrt(D)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        assert not sinks_n
        bias = self.bias
        has_groups = q.shape[1] != k.shape[1]
        if bias is not None and bias.dim() == 3:
            # With three dimensions, torch selects the kernel that stores all scores on a CPU.
            bias = bias.unsqueeze(0)
        if bias is not None and has_groups and not is_host(q.device.type):
            # Elsewhere it selects that kernel for grouped queries with a bias.
            if q.shape[2] == 1:
                return _attend_by_group(q, k, v, bias, dropout, self.scale)
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            has_groups = False
        if self.is_causal and dropout == 0.0 and _prefers_scores(q):
            return _attend_by_scores(q, k, v, self.scale)
        with backends_in_order(self.backends, q.device):
            return F.scaled_dot_product_attention(
                q, k, v, bias, dropout, self.is_causal, scale=self.scale, enable_gqa=has_groups
            )


@dataclass(frozen=True)
class EagerAttention:
    """Attention by scores that are computed in fp32, in blocks of queries and keys, and not saved
    for the backward pass. It computes every rule.

    To keys and values in fp32 it gives a query the same bits whatever else is computed with it:
    other texts, other queries of its text, or hidden keys. That holds with the kernels of torch for
    CPUs, except that a single query of a text gets other bits than one of several. torch's
    scaled_dot_product_attention computes blocks of other sizes for other numbers of queries and
    keys.
    """

    bias_BnSL: Tensor
    """fp32, added to the scores, -inf where a key is hidden; B and n may be 1. The bits are the
    same where L is a multiple of `KEY_BLOCK`."""
    rule: AttentionRule = PLAIN

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        texts, heads, queries, _ = q.shape
        dtype = q.dtype
        bias = self.bias_BnSL
        attend = partial(_attend_in_blocks, self.rule, dropout)
        if torch.is_grad_enabled():
            attend = partial(checkpoint, attend, use_reentrant=False)
        if queries == 1:
            attended: Tensor = attend(q, k, v, bias, *sinks_n)
            return attended.to(dtype)
        if missing := round_up(queries, QUERY_BLOCK) - queries:  # else it would copy them
            q = F.pad(q, (0, 0, 0, missing))
            bias = F.pad(bias, (0, 0, 0, missing))
        at_once = SCORES_AT_ONCE // (texts * heads * k.shape[2]) // QUERY_BLOCK * QUERY_BLOCK
        at_once = max(at_once, QUERY_BLOCK)
        parts = zip(q.split(at_once, dim=2), bias.split(at_once, dim=2), strict=True)
        blocks = [attend(part, k, v, part_bias, *sinks_n) for part, part_bias in parts]
        return torch.cat(blocks, dim=2)[:, :, :queries].to(dtype)


@dataclass(frozen=True)
class WindowAttention:
    """Attention of complete samples by a core for as many queries as a window has.

    Each sees its window and the one before it, so that the time is in proportion to the length.
    """

    make: Callable[[Tensor], AttentionCore]
    """Returns the core for a bias."""
    bias: Tensor
    """Bias [n, 2W, 2W] of two windows (W) of queries and keys, which depends only on their
    distance."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        blocks = []
        width = self.bias.shape[-1] // 2
        # Split once: the gradient of each slice of the keys would be as large as the keys.
        q_parts, k_parts, v_parts = (x.split(width, dim=2) for x in (q, k, v))
        for index, queries in enumerate(q_parts):
            start = max(0, index - 1)
            first = min(index, 1) * width
            end = first + queries.shape[2]
            keys, values = (torch.cat(x[start : index + 1], dim=2) for x in (k_parts, v_parts))
            core = self.make(self.bias[..., first:end, :end])
            blocks.append(core.attend(queries, keys, values, dropout, *sinks_n))
        return torch.cat(blocks, dim=2)


@dataclass(frozen=True)
class UlyssesAttention:
    """Attention on a slice of the sequence, by a core that sees all of it for some of the heads.

    S and L refer to the slice.
    """

    core: AttentionCore
    """Core for this rank's heads, and for all slices of the group."""
    group: Group
    """Ranks that share the heads."""
    chunked: int = 1
    """Number of context-parallel ranks in the group, each of which has two chunks of a sequence."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        sinks = (sink_n[local_slice(len(sink_n), self.group)] for sink_n in sinks_n)
        gathered = gather_sequence(q, k, v, self.group)
        q, k, v = (in_sequence_order(x, 2, self.chunked) for x in gathered)
        attended = in_rank_order(self.core.attend(q, k, v, dropout, *sinks), 2, self.chunked)
        return gather_heads(attended, self.group)


def _prefers_scores(q: Tensor) -> bool:
    is_short = is_host(q.device.type) and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT
    return is_short and torch.compiler.is_compiling()


def _attend_by_group(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Attention of one query [B, n, 1, D] of each text, without a copy of the keys and values.

    Heads that share keys are computed as one head with all their queries.
    """
    by_group = (q.shape[0], k.shape[1], -1, q.shape[3])
    bias = bias[(None,) * (4 - bias.dim())]
    if bias.shape[1] > 1:
        bias = bias.reshape(bias.shape[0], k.shape[1], -1, bias.shape[3])
    q_by_group = q.reshape(by_group)
    attended = F.scaled_dot_product_attention(q_by_group, k, v, bias, dropout, scale=scale)
    return attended.reshape(*q.shape[:-1], -1)


def _attend_by_scores(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention in operations that torch.compile fuses to one kernel between the two
    matmuls.

    Softmax is computed in fp32 and rounded once.
    """
    if q.shape[1] != k.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    position = torch.arange(q.shape[2], device=q.device)
    scores = (q @ k.transpose(-1, -2)).float() * (scale or q.shape[-1] ** -0.5)
    scores = scores.masked_fill(position > position.unsqueeze(1), -torch.inf)
    attended: Tensor = scores.softmax(-1).to(q.dtype) @ v
    return attended


def _attend_in_blocks(
    rule: AttentionRule,
    dropout: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *sinks_n: Tensor,
) -> Tensor:
    """Attention that multiplies weights and values in blocks of keys, added in their order."""
    texts, heads, queries, size = q.shape
    _, groups, num_keys, _ = k.shape
    # The queries that share a head's keys are rows of one matrix.
    q = q.reshape(texts, groups, -1, size).float()
    k = k.float()
    v = v.float()
    scores = (q @ k.transpose(-1, -2)).mul_(rule.scale or size**-0.5)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.view(texts, heads, queries, num_keys).add_(bias)
    for sink_n in sinks_n:
        column = sink_n.float().view(-1, 1, 1).expand(texts, -1, queries, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].reshape(texts, groups, -1, num_keys)
    weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
    if weights.shape[2] == 1:
        return weights @ v
    attended = weights[..., :KEY_BLOCK] @ v[:, :, :KEY_BLOCK]
    for start in range(KEY_BLOCK, num_keys, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        attended += weights[..., block] @ v[:, :, block]
    return attended.view(texts, heads, queries, v.shape[-1])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
