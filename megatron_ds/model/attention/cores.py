"""Attention cores: causal attention from queries, keys and values, one class per kind of mask.

Owns the calls of torch's scaled_dot_product_attention, and the order in which its kernels are
considered: one that cannot compute a call is passed over for the next one. On a CPU torch chooses.
Knows no projections, no positions and no random streams: a caller that wants dropout has chosen the
stream it is drawn from. Cores that end attention at document boundaries are in `packed_attention`.

Shapes: B micro-batch, S queries, L keys, n this rank's query heads, k its key-value heads, D head
size.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ds.config.devices import is_host
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.ulysses import gather_heads, gather_sequence

KEY_BLOCK = 64
QUERY_BLOCK = 8
"""Keys and queries of the matrix products of `BatchInvariantAttention`: with other numbers the
kernels of CPUs add in another order."""
SCORES_AT_ONCE = 2**24
"""Number of scores that `BatchInvariantAttention` has in memory."""
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
"""Without cuDNN's kernel, which builds a plan of tens of milliseconds for each new number of
queries and keys."""


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
    """softmax(q k^T / sqrt(D) + mask) v."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Compute causal attention.

        Args:
            q: Queries [B, n, S, D].
            k: Keys [B, k, L, D]; each serves n / k query heads. Cached ones may be of a wider type
                than the queries.
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
    backends: Order = ()
    """Kernels to consider on a device. Empty: those that the caller has selected."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        bias, has_groups = self.bias, q.shape[1] != k.shape[1]
        if bias is not None and bias.dim() == 3:
            # With three dimensions, torch selects the kernel that stores all scores on a CPU.
            bias = bias.unsqueeze(0)
        if bias is not None and has_groups and not is_host(q.device.type):
            # Elsewhere it selects that kernel for grouped queries with a bias.
            if q.shape[2] == 1:
                return _attend_by_group(q, k, v, bias, dropout)
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
            has_groups = False
        if self.is_causal and dropout == 0.0 and _prefers_scores(q):
            return _attend_by_scores(q, k, v)
        with backends_in_order(self.backends, q.device):
            return F.scaled_dot_product_attention(
                q, k, v, bias, dropout, self.is_causal, enable_gqa=has_groups
            )


@dataclass(frozen=True)
class BatchInvariantAttention:
    """Attention to keys and values in fp32 that gives a query the same bits whatever else is
    computed with it: other texts, other queries of its text, or hidden keys.

    That holds with the kernels of torch for CPUs, except that a single query of a text gets other
    bits than one of several. torch's scaled_dot_product_attention computes blocks of other sizes
    for other numbers of queries and keys.
    """

    bias_BnSL: Tensor
    """fp32, added to the scores, -inf where a key is hidden; n may be 1. L is a multiple of
    `KEY_BLOCK`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        assert dropout == 0.0
        texts, heads, queries, _ = q.shape
        bias, q32 = self.bias_BnSL, q.to(k.dtype)
        if queries == 1:
            return _attend_in_blocks(q32, k, v, bias).to(q.dtype)
        missing = (0, 0, 0, round_up(queries, QUERY_BLOCK) - queries)
        q32, bias = F.pad(q32, missing), F.pad(bias, missing)
        at_once = SCORES_AT_ONCE // (texts * heads * k.shape[2]) // QUERY_BLOCK * QUERY_BLOCK
        at_once = max(at_once, QUERY_BLOCK)
        parts = zip(q32.split(at_once, dim=2), bias.split(at_once, dim=2), strict=True)
        attended = [_attend_in_blocks(part, k, v, own) for part, own in parts]
        return torch.cat(attended, dim=2)[:, :, :queries].to(q.dtype)


@dataclass(frozen=True)
class UlyssesAttention:
    """Attention on a slice of the sequence, by a core that sees all of it for some of the heads.

    S and L refer to the slice.
    """

    core: AttentionCore
    """Core for the complete sequence and this rank's heads."""
    group: Group
    """Sequence-parallel group."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        q, k, v = gather_sequence(q, k, v, self.group)
        return gather_heads(self.core.attend(q, k, v, dropout), self.group)


def _prefers_scores(q: Tensor) -> bool:
    is_short = is_host(q.device.type) and q.dtype == torch.bfloat16 and q.shape[2] <= SHORT
    return is_short and torch.compiler.is_compiling()


def _attend_by_group(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    """Attention of one query [B, n, 1, D] of each text, without a copy of the keys and values.

    Heads that share keys are computed as one head with all their queries.
    """
    by_group = (q.shape[0], k.shape[1], -1, q.shape[3])
    bias = bias[(None,) * (4 - bias.dim())]
    if bias.shape[1] > 1:
        bias = bias.reshape(bias.shape[0], k.shape[1], -1, bias.shape[3])
    attended = F.scaled_dot_product_attention(q.reshape(by_group), k, v, bias, dropout)
    return attended.reshape(q.shape)


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


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Attention that multiplies weights and values in blocks of keys, added in their order."""
    (texts, heads, queries, size), (_, groups, num_keys, _) = q.shape, k.shape
    # The queries that share a head's keys are rows of one matrix.
    scores = q.reshape(texts, groups, -1, size) @ k.transpose(-1, -2)
    scores = scores.mul_(size**-0.5).view(texts, heads, queries, num_keys).add_(bias)
    weights = scores.softmax(dim=-1).view(texts, groups, -1, num_keys)
    if weights.shape[2] == 1:
        return weights @ v
    attended = weights[..., :KEY_BLOCK] @ v[:, :, :KEY_BLOCK]
    for start in range(KEY_BLOCK, num_keys, KEY_BLOCK):
        block = slice(start, start + KEY_BLOCK)
        attended += weights[..., block] @ v[:, :, block]
    return attended.view(texts, heads, queries, size)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
