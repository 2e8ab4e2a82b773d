"""Attention of a context-parallel rank: its queries to the keys of all ranks.

A rank's attention is computed in blocks, one or two for the keys of each rank, whose softmaxes are
joined by the logarithms of their sums, in fp32. Only the result and those logarithms are kept for
the backward pass, in which the keys are exchanged again.

Shapes: B micro-batch, N ranks, w tokens of a chunk, S = 2w this rank's tokens, n query heads, k
key-value heads, D head size, V that of the values, L keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.config.options.parallel import P2P
from megatron_ds.model.attention.blocks import (
    ExplicitBlocks,
    FlashBlocks,
    HostFlashBlocks,
    Kernel,
    Part,
    document_starts,
    finite,
    flash_is_right,
)
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.model.attention.segments import SegmentBlocks, document_bounds
from megatron_ds.parallel.context.exchange import EXCHANGES, Exchange, Received
from megatron_ds.parallel.context.layout import CHUNKS, Block, ContextLayout, VisibleKeys
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.rng import default_state, set_default_state


@dataclass(frozen=True)
class KeyGradients:
    """Keys and values of what was exchanged, and sums of their gradients."""

    k: Tensor
    """Keys [B, k, L, D]."""
    v: Tensor
    """Values [B, k, L, V]."""
    k_grad: Tensor
    """Gradient of the keys in fp32, to which those of blocks are added."""
    v_grad: Tensor
    """Gradient of the values, likewise."""
    finish: Callable[[], Sequence[Tensor]]
    """Returns the gradients of what was exchanged, and of each weight of the expansion."""


class Expansion(Protocol):
    """Computes keys and values of what ranks exchange, [B, k or 1, L, E]."""

    @property
    def value_size(self) -> int:
        """V."""
        ...

    def keys_and_values(self, exchanged: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, k, L, D] and values [B, k, L, V]."""
        ...

    def differentiating(self, exchanged: Tensor, *weights: Tensor) -> KeyGradients:
        """The same, with zeros for their gradients."""
        ...


@dataclass(frozen=True)
class Adjoining:
    """Keys and values are exchanged side by side, [B, k, L, D + V]."""

    sizes: tuple[int, int]
    """D and V."""

    @property
    def value_size(self) -> int:
        return self.sizes[1]

    def keys_and_values(self, exchanged: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        k, v = exchanged.split(self.sizes, dim=-1)
        return k, v

    def differentiating(self, exchanged: Tensor, *weights: Tensor) -> KeyGradients:
        grad = torch.zeros_like(exchanged, dtype=torch.float32)
        k, v = self.keys_and_values(exchanged)
        k_grad, v_grad = self.keys_and_values(grad)  # views

        def finish() -> Sequence[Tensor]:
            return [grad]

        return KeyGradients(k, v, k_grad, v_grad, finish)


@dataclass(frozen=True)
class ContextAttention:
    """An `AttentionCore` for the tokens of a context-parallel rank."""

    rule: AttentionRule
    group: Group
    """Context-parallel group."""
    kind: str = P2P
    """Kind of exchange, a key of `EXCHANGES`."""
    slopes_n: Tensor | None = None
    """ALiBi's slopes of this rank's heads."""
    documents_BS: Tensor | None = None
    """Number of the document of each token of complete sequences, if attention ends with one."""

    @cached_property
    def visible(self) -> VisibleKeys:
        """The keys that queries see."""
        ids_BS = self.documents_BS
        return VisibleKeys(self.rule.window, None if ids_BS is None else document_starts(ids_BS))

    @cached_property
    def bounds(self) -> list[list[int]] | None:
        """Where documents start and end, if attention ends with one."""
        return None if self.documents_BS is None else document_bounds(self.documents_BS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        """See `AttentionCore.attend`; the queries, keys and values are those of this rank."""
        expansion = Adjoining((k.shape[-1], v.shape[-1]))
        # In the order in memory in which chunks are sent.
        exchanged = torch.cat([k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)], dim=-1)
        exchanged = exchanged.permute(1, 2, 0, 3)
        return self.attend_to(q, exchanged, expansion, (), dropout, *sinks_n)

    def attend_to(
        self,
        q: Tensor,
        exchanged: Tensor,
        expansion: Expansion,
        weights: Sequence[Tensor],
        dropout: float,
        *sinks_n: Tensor,
    ) -> Tensor:
        """Attention to keys and values that each rank computes of what it receives.

        Args:
            q: Queries [B, n, S, D].
            exchanged: What ranks exchange, [B, k or 1, S, E].
            expansion: Computes keys and values of it.
            weights: Weights of the expansion.
            dropout: Probability with which a weight of the softmax is dropped.
            sinks_n: The logit of each head, of rules with sinks.

        Returns:
            [B, n, S, V].
        """
        call = _Call(self, expansion, len(weights), dropout)
        attended: Tensor = _ContextAttention.apply(call, q, exchanged, *weights, *sinks_n)
        return attended


@dataclass(frozen=True)
class _Call:
    """One forward pass of attention and its backward pass, without their tensors."""

    core: ContextAttention
    expansion: Expansion
    num_weights: int
    dropout: float

    def kernel(self, q: Tensor) -> Kernel:
        """The fastest kernel that computes this attention. Sinks are added to what it returns."""
        core = self.core
        rule = core.rule
        has_flash = rule.softcap is None and not rule.alibi and self.dropout == 0.0
        if has_flash and q.shape[-1] == self.expansion.value_size:
            flash: HostFlashBlocks | FlashBlocks | None = None
            if is_host(q.device.type):
                flash = HostFlashBlocks(rule.scale)
            elif rule.window is None and flash_is_right(q.shape[-1], rule.scale, q.dtype, q.device):
                flash = FlashBlocks(rule.scale)
            is_plain = rule.window is None and core.documents_BS is None
            if flash is not None:
                return flash if is_plain else SegmentBlocks(flash, rule.window, core.bounds)
        slopes_n = core.slopes_n if rule.alibi else None
        return ExplicitBlocks(rule, core.visible, slopes_n, core.documents_BS, self.dropout)

    def layout(self, q: Tensor) -> ContextLayout:
        group = self.core.group
        return ContextLayout(group.rank, group.size, q.shape[2] // CHUNKS, self.core.visible)

    def exchange(self, exchanged: Tensor, layout: ContextLayout) -> Exchange:
        by_chunk = _by_chunk(exchanged, CHUNKS)
        return EXCHANGES[self.core.kind](by_chunk, self.core.group, layout.needs)

    def attend(
        self, q: Tensor, exchanged: Tensor, weights: Sequence[Tensor], sinks_n: Sequence[Tensor]
    ) -> Part:
        """Attention to the keys of all ranks."""
        layout = self.layout(q)
        kernel = self.kernel(q)
        blocks = partial(_blocks, layout, kernel)
        size = self.expansion.value_size
        attended = torch.zeros(*q.shape[:3], size, dtype=torch.float32, device=q.device)
        total = Part(attended, attended.new_full(q.shape[:3], -torch.inf))
        for received in self.exchange(exchanged, layout).receive():
            if received.chunks:
                k, v = self.expansion.keys_and_values(_in_order(received.values), *weights)
                for block in blocks(received):
                    rows = block.queries
                    keys = block.keys
                    part = kernel.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], block)
                    _add_part(total, part, rows)
        log_sum = total.log_sum
        for sink_n in sinks_n:
            with_sink = torch.logaddexp(log_sum, sink_n.float()[:, None])
            attended *= (log_sum - with_sink).exp().unsqueeze(-1)
            log_sum = with_sink
        return Part(attended.to(q.dtype), log_sum)

    def differentiate(
        self,
        grad: Tensor,
        q: Tensor,
        exchanged: Tensor,
        complete: Part,
        weights: Sequence[Tensor],
        sinks_n: Sequence[Tensor],
    ) -> list[Tensor]:
        """Gradients of the queries, of what was exchanged, of the weights and of the sinks."""
        layout = self.layout(q)
        kernel = self.kernel(q)
        blocks = partial(_blocks, layout, kernel)
        q_grad = torch.zeros_like(q, dtype=torch.float32)
        weight_grads = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        exchange = self.exchange(exchanged, layout)
        for received in exchange.receive():
            grads = received.values
            if received.chunks:
                keys_of = self.expansion.differentiating(_in_order(received.values), *weights)
                for block in blocks(received):
                    rows = block.queries
                    keys = block.keys
                    attention = Part(complete.attended[:, :, rows], complete.log_sum[:, :, rows])
                    inputs = q[:, :, rows], keys_of.k[:, :, keys], keys_of.v[:, :, keys]
                    part = kernel.backward(grad[:, :, rows], *inputs, attention, block)
                    q_grad[:, :, rows] += part.q
                    keys_of.k_grad[:, :, keys] += part.k
                    keys_of.v_grad[:, :, keys] += part.v
                exchanged_grad, *own_weight_grads = keys_of.finish()
                grads = _by_chunk(exchanged_grad.float(), len(received.chunks))
                for total, summand in zip(weight_grads, own_weight_grads, strict=True):
                    total += summand
            exchange.give_back(received, grads)
        exchanged_grad = _in_order(exchange.collect())
        mean = (grad.float() * complete.attended.float()).sum(-1)
        sink_grads = [
            -((sink_n.float()[:, None] - complete.log_sum).exp() * mean).sum((0, 2))
            for sink_n in sinks_n
        ]
        likes = [q, exchanged, *weights, *sinks_n]
        grads_of = [q_grad, exchanged_grad, *weight_grads, *sink_grads]
        return [grad.to(like.dtype) for grad, like in zip(grads_of, likes, strict=True)]


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, exchanged: Tensor, *others: Tensor) -> Tensor:
        ctx.call = call
        ctx.random_state = default_state(q.device) if call.dropout > 0.0 else None
        weights = others[: call.num_weights]
        sinks_n = others[call.num_weights :]
        attended, log_sum = call.attend(q, exchanged, weights, sinks_n)
        ctx.save_for_backward(q, exchanged, attended, log_sum, *others)
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, exchanged, attended, log_sum, *others = ctx.saved_tensors
        weights = others[: call.num_weights]
        sinks_n = others[call.num_weights :]
        complete = Part(attended, log_sum)
        with _drawing_from(ctx.random_state, q.device):
            grads = call.differentiate(grad, q, exchanged, complete, weights, sinks_n)
        return None, *grads


def _blocks(layout: ContextLayout, kernel: Kernel, received: Received) -> Iterator[Block]:
    return layout.blocks(received.owner, received.chunks, joined=not kernel.needs_positions)


def _by_chunk(exchanged: Tensor, chunks: int) -> Tensor:
    """[B, k, L, E] to [chunks, w, B, k, E], contiguous; no copy where it is in that order."""
    by_chunk: Tensor = exchanged.permute(2, 0, 1, 3).unflatten(0, (chunks, -1))  # type: ignore[no-untyped-call]
    return by_chunk.contiguous()


def _in_order(values: Tensor) -> Tensor:
    """The inverse of `_by_chunk`, a view."""
    return values.flatten(0, 1).permute(1, 2, 0, 3)


def _add_part(total: Part, part: Part, rows: slice) -> None:
    """Add the attention of some queries to further keys, in place.

    torch.logaddexp of two that are -inf is -inf: a query has seen no key yet.
    """
    before = total.log_sum[:, :, rows]
    after = torch.logaddexp(before, part.log_sum)
    shift = finite(after)
    attended = total.attended[:, :, rows]
    attended *= (before - shift).exp().unsqueeze(-1)
    attended += part.attended * (part.log_sum - shift).exp().unsqueeze(-1)
    before.copy_(after)


@contextmanager
def _drawing_from(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Within it, the default generator draws what it drew in the forward pass."""
    if state is None:
        yield
        return
    current = default_state(device)
    set_default_state(device, state)
    try:
        yield
    finally:
        set_default_state(device, current)
