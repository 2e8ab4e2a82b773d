"""Masks and biases of attention scores, and the tables of them that forward passes share.

Tables are plain fp32 tensors made on first use (not buffers, which an engine would cast).

Shapes: B micro-batch, S queries, L keys (S and the cached ones), n this rank's heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ds.model.attention.rule import AttentionRule

BLOCK = 128
"""Queries and keys of a block of flex attention."""


class MaskTables:
    """Masks and biases of a model's attention, kept from one forward pass to the next.

    Args:
        slopes: ALiBi's slopes of this rank's heads.
    """

    def __init__(self, slopes: list[float]) -> None:
        self._slopes = slopes
        self.device_slopes: Tensor | None = None
        """ALiBi's slopes, once they were needed."""
        self._kept: dict[tuple[AttentionRule, str], tuple[tuple[object, ...], Any]] = {}
        self._longest_document = 1

    def slopes(self, rule: AttentionRule, device: torch.device) -> Tensor | None:
        """The slopes [n], kept on the device, because each copy would synchronize with it; None
        without ALiBi."""
        if rule.alibi and (self.device_slopes is None or self.device_slopes.device != device):
            self.device_slopes = torch.tensor(self._slopes, device=device)
        return self.device_slopes if rule.alibi else None

    def bias(
        self, rule: AttentionRule, length: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Score bias for `length` tokens [n, S, S]; [1, S, S] without ALiBi."""
        slopes = self._slopes if rule.alibi else [0.0]
        make = partial(score_bias, slopes, length, device, dtype, rule.window)
        bias: Tensor = self._keep((rule, "bias"), (length, dtype, device), make)
        return bias

    def document_bias(
        self, rule: AttentionRule, longest: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """The bias inside documents, as wide as the longest so far; None: it is only causal.

        Distances are the same in every document.
        """
        self._longest_document = max(self._longest_document, longest)
        width = self._longest_document
        if not rule.has_mask(width):
            return None
        return self.bias(rule, width, dtype, device)

    def blocks(self, rule: AttentionRule, length: int, device: torch.device) -> Any:
        """The BlockMask of complete samples, kept while their length stays the same."""

        def make() -> Any:
            one_document = torch.zeros((1, length), dtype=torch.int32, device=device)
            return block_mask(one_document, rule.window, is_causal_only=True)

        return self._keep((rule, "blocks"), (length, device), make)

    def _keep(
        self, slot: tuple[AttentionRule, str], key: tuple[object, ...], make: Callable[[], Any]
    ) -> Any:
        if slot not in self._kept or self._kept[slot][0] != key:
            self._kept.pop(slot, None)  # freed before the next one is allocated
            self._kept[slot] = key, make()
        return self._kept[slot][1]


def _is_visible(distance: Tensor, window: int | None) -> Tensor:
    """Whether keys are visible at these distances, which are negative for earlier ones."""
    visible = distance <= 0
    return visible if window is None else visible & (distance > -window)


def ragged_bias(
    positions_BS: Tensor,
    keys: int | Tensor,
    dtype: torch.dtype,
    slopes_n: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """0, or minus slope x distance, where a key is visible, -inf elsewhere: [B, n or 1, S, L].

    Args:
        positions_BS: Positions of the queries of texts with different lengths, whose keys start at
            position 0.
        keys: Number of keys, which have the positions from 0 on, or their positions, [B or 1, L].
        dtype: Type of the result.
        slopes_n: ALiBi slopes. None: without ALiBi.
        window: Keys that a query attends to. None: all.
    """
    if isinstance(keys, int):
        keys = torch.arange(keys, device=positions_BS.device)[None]
    distance_B1SL = (keys[:, None, None] - positions_BS[:, None, :, None]).float()
    bias = distance_B1SL * (0.0 if slopes_n is None else slopes_n[:, None, None])
    return bias.masked_fill_(~_is_visible(distance_B1SL, window), -torch.inf).to(dtype)


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al. 2022, with their rule for odd numbers of heads)."""

    def geometric(count: int) -> list[float]:
        ratio = 2.0 ** (-8.0 / count)
        return [ratio ** (index + 1) for index in range(count)]

    power = 2 ** int(math.log2(heads))
    return geometric(power) + geometric(2 * power)[0::2][: heads - power]


def score_bias(
    slopes: list[float],
    length: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> Tensor:
    """Minus slope x distance where a key is visible, -inf elsewhere: [n, S, S].

    Computed in fp32, one head at a time, because the table of all heads can be large.
    """
    positions = torch.arange(length, device=device)
    distance = (positions - positions.unsqueeze(1)).float()
    hidden = ~_is_visible(distance, window)
    bias = torch.empty((len(slopes), length, length), dtype=dtype, device=device)
    for head, slope in zip(bias, slopes, strict=True):
        head.copy_(distance * slope).masked_fill_(hidden, -torch.inf)
    return bias


def block_mask(
    doc_ids_BS: Tensor, window: int | None = None, *, is_causal_only: bool = False
) -> Any:
    """The BlockMask of causal intra-document attention.

    With `is_causal_only`, the tokens are one document, and the mask serves all rows.

    torch's create_block_mask computes the same from all [S, S] scores. Document numbers never
    decrease along a row, so a block's first and last number show which documents it contains.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = doc_ids_BS.shape[1]
    positions = torch.arange(-(-length // BLOCK) * BLOCK, device=doc_ids_BS.device)
    padded = doc_ids_BS[:, positions.clamp(max=length - 1)]
    first = padded[:, ::BLOCK]
    last = padded[:, BLOCK - 1 :: BLOCK]
    block = positions[: first.shape[1]]
    queries = block.unsqueeze(1)
    keys = block.unsqueeze(0)
    needed = (keys <= queries) & (last.unsqueeze(1) >= first.unsqueeze(2))
    # Full blocks are not masked element by element. The last block of a sample counts as full only
    # if it is complete.
    same_document = first.unsqueeze(1) == last.unsqueeze(2)
    full = same_document & (keys < queries) & ((queries + 1) * BLOCK <= length)
    if window is not None:  # from the first, or to the last, query of a block
        needed &= (keys + 1) * BLOCK - 1 > queries * BLOCK - window
        full &= keys * BLOCK > (queries + 1) * BLOCK - 1 - window

    def causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _is_visible(key - query, window)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal(row, head, query, key) & (doc_ids_BS[row, query] == doc_ids_BS[row, key])

    return BlockMask.from_kv_blocks(
        *_block_lists(needed & ~full),
        *_block_lists(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=causal if is_causal_only else visible,
        seq_lengths=(length, length),
    )


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, and their indices, in order, before all others."""
    chosen = blocks.int().unsqueeze(1)
    indices = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), indices.int()
