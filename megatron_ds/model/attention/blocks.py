"""Attention of some queries to some keys, and its gradients once the sum of all keys is known.

Kernels that return the logarithm of the sum of a softmax, so that attention to further keys can be
added, and whose backward pass takes the sum over all keys.

Shapes: B micro-batch, S queries, L keys, n query heads, k key-value heads, D head size, V that of
the values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.model.attention.cores import SCORES_AT_ONCE
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.parallel.context.layout import Block, VisibleKeys

TRIAL_TOKENS = 256
TRIAL_TOLERANCES = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest accepted error of flash attention, relative to the norm."""
HOST_SCORES_AT_ONCE = 2**20
"""Scores of a tile on a CPU, about what its cache holds; devices compute more at once."""
QUERIES_AT_ONCE = 512
"""Queries of a tile of `ExplicitBlocks`. Fewer leave out more of the keys that a tile does not
see."""


def document_starts(documents_BS: Tensor) -> list[int]:
    """`VisibleKeys.document_starts` of the numbers of tokens' documents, which do not decrease.

    Synchronizes with the device.
    """
    positions_S = torch.arange(documents_BS.shape[1], device=documents_BS.device)
    is_first_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    is_first_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    starts_BS = torch.where(is_first_BS, positions_S, 0).cummax(1).values
    starts: list[int] = starts_BS.amin(0).tolist()
    return starts


class Part(NamedTuple):
    """Attention of some queries to some keys."""

    attended: Tensor
    """[B, n, S, V], normalized over these keys; 0 for a query that sees none of them."""
    log_sum: Tensor
    """Logarithm of the sum of the exponentials of the scores [B, n, S], fp32; -inf for a query that
    sees none of them."""


class Gradients(NamedTuple):
    """Gradients of the inputs of a block."""

    q: Tensor
    k: Tensor
    v: Tensor


class Kernel(Protocol):
    """Computes attention of blocks."""

    needs_positions: bool
    """Whether it needs positions. The queries and the keys of a block then belong to one chunk."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Part:
        """Attention of queries [B, n, S, D] to keys [B, k, L, D] and values [B, k, L, V]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, complete: Part, block: Block
    ) -> Gradients:
        """Gradients of a block's inputs.

        Args:
            grad: Gradient of the attention to all keys, of the block's queries.
            q: Queries.
            k: Keys.
            v: Values.
            complete: The attention to all keys.
            block: The block.
        """
        ...


@dataclass(frozen=True)
class HostFlashBlocks:
    """torch's flash attention of CPUs."""

    scale: float | None = None
    needs_positions = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, mask: Tensor | None = None
    ) -> Part:
        """See `Kernel.forward`.

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            block: The block.
            mask: Added to the scores, [1, 1, S, L]. It leaves each query a key.
        """
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return Part(*attend(q, k, v, 0.0, block.is_causal, attn_mask=mask, scale=self.scale))

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        complete: Part,
        block: Block,
        mask: Tensor | None = None,
    ) -> Gradients:
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        options = {"attn_mask": mask, "scale": self.scale}
        return Gradients(*differentiate(grad, q, k, v, *complete, 0.0, block.is_causal, **options))


@dataclass(frozen=True)
class FlashBlocks:
    """torch's flash attention of devices, in half precision."""

    scale: float | None = None
    needs_positions = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Part:
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        attend = torch.ops.aten._scaled_dot_product_flash_attention
        return Part(*attend(q, k, v, 0.0, block.is_causal, False, scale=self.scale)[:2])

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, complete: Part, block: Block
    ) -> Gradients:
        heads = k.shape[1]
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_backward
        nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # of packed samples, dropout
        lengths = (nothing, nothing, q.shape[2], k.shape[2])
        random_state = (nothing, nothing)
        # The kernel does not know the strides of the sums.
        grads = differentiate(
            grad,
            q,
            k,
            v,
            complete.attended,
            complete.log_sum.contiguous(),
            *lengths,
            0.0,
            block.is_causal,
            *random_state,
            scale=self.scale,
        )
        return Gradients(grads[0], *(_summed(x, heads) for x in grads[1:]))


@dataclass(frozen=True)
class ExplicitBlocks:
    """Scores that are computed in fp32, in tiles of queries and the keys that they may see.

    It computes every rule, documents and dropout.
    """

    rule: AttentionRule
    visible: VisibleKeys
    """The keys that queries see by the rule and the documents."""
    slopes_n: Tensor | None = None
    """ALiBi's slopes."""
    documents_BS: Tensor | None = None
    """Number of the document of each token of complete sequences, if attention ends with one."""
    dropout: float = 0.0
    needs_positions = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: Block) -> Part:
        attended = []
        log_sums = []
        for tile in self._tiles(q, k, block):
            scores, _ = self._scores(q, k, tile)
            log_sum = scores.logsumexp(dim=-1)
            weights = self._dropped((scores - finite(log_sum).unsqueeze(-1)).exp_())
            attended.append(_multiply(weights, v[:, :, tile.keys].float()))
            log_sums.append(log_sum)
        return Part(torch.cat(attended, dim=2), torch.cat(log_sums, dim=2))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, complete: Part, block: Block
    ) -> Gradients:
        q_grads = []
        k_grad = torch.zeros_like(k, dtype=torch.float32)
        v_grad = torch.zeros_like(v, dtype=torch.float32)
        for tile in self._tiles(q, k, block):
            rows = tile.queries
            keys = tile.keys
            scores, slope = self._scores(q, k, tile)
            weights = (scores - complete.log_sum[:, :, rows].unsqueeze(-1)).exp_()
            dropped = self._dropped(weights)
            grad_rows = grad[:, :, rows].float()
            v_grad[:, :, keys] += _multiply_transposed(dropped, grad_rows, v.shape[1])
            # The derivative of softmax, in which the mean of the weights' gradients is that of the
            # attention times the attention.
            mean = (grad_rows * complete.attended[:, :, rows]).sum(-1, keepdim=True)
            weight_grad = _multiply(grad_rows, v[:, :, keys].float().transpose(-1, -2))
            score_grad = dropped * weight_grad - weights * mean
            if slope is not None:
                score_grad *= slope
            score_grad *= self._scale(q)
            q_grads.append(_multiply(score_grad, k[:, :, keys].float()))
            q_rows = q[:, :, rows].float()
            k_grad[:, :, keys] += _multiply_transposed(score_grad, q_rows, k.shape[1])
        return Gradients(torch.cat(q_grads, dim=2), k_grad, v_grad)

    def _scale(self, q: Tensor) -> float:
        return self.rule.scale or q.shape[-1] ** -0.5

    def _tiles(self, q: Tensor, k: Tensor, block: Block) -> Iterator[Block]:
        """Tiles of a block, whose slices are those of its own queries and keys."""
        rows, heads, queries, _ = q.shape
        limit = HOST_SCORES_AT_ONCE if is_host(q.device.type) else SCORES_AT_ONCE
        start = 0
        while start < queries:
            first = block.first_query + start
            seen_start = max(0, self.visible.first(first) - block.first_key)
            size = min(QUERIES_AT_ONCE, queries - start)
            seen_end = min(k.shape[2], first + size - block.first_key)
            size = min(size, max(1, limit // (rows * heads * max(1, seen_end - seen_start))))
            seen_end = min(seen_end, first + size - block.first_key)
            seen = slice(min(seen_start, seen_end - 1), seen_end)  # one key where none is seen
            part = slice(start, start + size)
            yield Block(part, seen, block.is_causal, first, block.first_key + seen.start)
            start += size

    def _scores(self, q: Tensor, k: Tensor, tile: Block) -> tuple[Tensor, Tensor | None]:
        """Scores [B, n, S, L], -inf where a key is hidden, and the derivative of the soft cap."""
        q = q[:, :, tile.queries].float()
        k = k[:, :, tile.keys].float()
        scores = _multiply(q, k.transpose(-1, -2)) * self._scale(q)
        slope = None
        if (cap := self.rule.softcap) is not None:
            bounded = torch.tanh(scores / cap)
            scores = cap * bounded
            slope = 1 - bounded.square()
        queries = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + tile.first_query
        keys = torch.arange(k.shape[2], device=q.device) + tile.first_key
        distance = keys - queries
        if self.slopes_n is not None:
            scores += self.slopes_n[:, None, None] * distance
        hidden = distance > 0
        if self.rule.window is not None:
            hidden |= distance <= -self.rule.window
        if self.documents_BS is not None:
            query_ids = self.documents_BS[:, tile.first_query :][:, : q.shape[2], None]
            key_ids = self.documents_BS[:, None, tile.first_key :][..., : k.shape[2]]
            hidden = hidden | (query_ids != key_ids)
            hidden = hidden.unsqueeze(1)
        return scores.masked_fill_(hidden, -torch.inf), slope

    def _dropped(self, weights: Tensor) -> Tensor:
        """The weights after dropout, by the default generator."""
        if self.dropout == 0.0:
            return weights
        kept = torch.empty_like(weights).bernoulli_(1 - self.dropout)
        return weights * kept / (1 - self.dropout)


@functools.cache
def flash_is_right(
    size: int, scale: float | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether `FlashBlocks` equals `ExplicitBlocks` in a trial on this device.

    Args:
        size: Size of a head.
        scale: Scale of the scores.
        dtype: Type of the activations; flash attention needs half precision.
        device: The device.
    """
    if dtype not in TRIAL_TOLERANCES:
        return False
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, TRIAL_TOKENS, size) for heads in (4, 2, 2, 4)]
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    q, k, v, grad = drawn
    explicit = ExplicitBlocks(AttentionRule(scale=scale), VisibleKeys())
    for is_causal in (True, False):
        every = slice(0, TRIAL_TOKENS)
        block = Block(every, every, is_causal, 0 if is_causal else TRIAL_TOKENS, 0)
        results = []
        for kernel in (explicit, FlashBlocks(scale)):
            try:
                part = kernel.forward(q, k, v, block)
                # As for a block: a part of the queries.
                attended, log_sum = (torch.cat([x] * 2, dim=2)[:, :, every] for x in part)
                complete = Part(attended.to(dtype), log_sum)
                gradients = kernel.backward(grad, q, k, v, complete, block)
            except RuntimeError:  # of a device without this kernel
                return False
            results.append([*part, *gradients])
        for expected, computed in zip(*results, strict=True):
            error = (computed.float() - expected.float()).norm() / expected.float().norm()
            if not error <= TRIAL_TOLERANCES[dtype]:  # nor if it is nan
                return False
    return True


def finite(log_sum: Tensor) -> Tensor:
    """0 where no key is seen, so that differences with it are not nan."""
    return log_sum.masked_fill(log_sum == -torch.inf, 0.0)


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    """x y for x [B, n, S, L] and y [B, k, L, V], each of which serves n / k heads: [B, n, S, V]."""
    by_group = x.reshape(x.shape[0], y.shape[1], -1, x.shape[3])
    return (by_group @ y).view(*x.shape[:3], -1)


def _multiply_transposed(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """x^T y for x [B, n, S, L] and y [B, n, S, V], summed over n / k heads: [B, k, L, V]."""
    x = x.reshape(x.shape[0], groups, -1, x.shape[3])
    y = y.reshape(y.shape[0], groups, -1, y.shape[3])
    return x.transpose(-1, -2) @ y


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[B, k, L, D] to [B, n, L, D]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """The gradient of `_repeated`."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32)  # type: ignore[no-untyped-call]
