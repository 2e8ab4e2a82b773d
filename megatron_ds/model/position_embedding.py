"""How positions enter attention: rope's rotation, alibi's bias, the causal mask, documents' bounds.

Learned positions are part of the embedding; here they need only the mask. Tables are plain fp32
tensors made on first use (not buffers: an engine would cast them), remembered by the object that
made them.

Shapes: S queries, L keys (S and those in the cache), n this rank's heads, R rotated part of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_ds.config import ModelConfig
from megatron_ds.model.packed_attention import (
    DocumentAttention,
    DocumentFlexAttention,
    PackedBatchInfo,
    PerDocumentSDPA,
    row_lengths,
)
from megatron_ds.parallel.mesh import Group


@dataclass(frozen=True)
class AttentionContext:
    """What every layer's attention needs to know of the positions of one forward pass."""

    rotation: tuple[torch.Tensor, torch.Tensor] | None
    """Rope's cosines and sines, each [S, 1, 1, R], or [S, B, 1, R] where positions restart with a
    document; fp32."""
    bias: torch.Tensor | None
    """Added to the scores (or, if bool, where attention may look): broadcasts to [B, n, S, L]."""
    is_causal: bool
    """The mask is the plain lower triangle and `bias` is None."""
    documents: DocumentAttention | None = None
    """Computes attention in place of bias and mask, where it ends with a document."""


class PositionEncoder:
    """Builds the context of a forward pass."""

    def __init__(self, config: ModelConfig, group: Group) -> None:
        """group: the tensor-parallel group over which the heads are cut."""
        self._kind = config.position_embedding_type
        self._longest = config.seq_length
        self._rotated = int(config.head_dim * config.rotary_percent)
        self._base = config.rotary_base
        local = config.num_attention_heads // group.size
        slopes = alibi_slopes(config.num_attention_heads)
        self._slopes = slopes[group.rank * local : (group.rank + 1) * local]
        self._rope_table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._alibi_key: tuple[int, int, torch.dtype, torch.device] | None = None
        self._alibi_bias: torch.Tensor | None = None
        self._slopes_there: torch.Tensor | None = None
        self._longest_document = 1

    def context(
        self,
        queries: int,
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        documents: PackedBatchInfo | None = None,
    ) -> AttentionContext:
        """queries: tokens of this pass. offset: tokens before them, in the cache. dtype: of the
        activations. documents: of the tokens, where their bounds count; needs offset 0.
        """
        rotation = self._rotation(queries, offset, device) if self._kind == "rope" else None
        places_BS = None if documents is None else documents.positions_BS
        if rotation is not None and places_BS is not None:
            cos, sin = rotation
            at = places_BS.t()
            rotation = cos[at].squeeze(2), sin[at].squeeze(2)
        if documents is not None and documents.rules.reset_attention:
            inside = self._in_documents(documents, dtype, device)
            return AttentionContext(rotation, None, is_causal=False, documents=inside)
        if self._kind == "alibi":
            bias = self._alibi(queries, offset + queries, dtype, device)
            return AttentionContext(rotation, bias, is_causal=False)
        if offset == 0:
            return AttentionContext(rotation, None, is_causal=True)
        visible = None if queries == 1 else visible_keys(queries, offset + queries, device)
        return AttentionContext(rotation, visible, is_causal=False)

    def _rotation(
        self, queries: int, offset: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = offset + queries
        table = self._rope_table
        if table is None or table[0].device != device or table[0].shape[0] < end:
            table = rope_table(max(end, self._longest), self._rotated, self._base, device)
            self._rope_table = table
        cos, sin = table
        return cos[offset:end], sin[offset:end]

    def _in_documents(
        self, documents: PackedBatchInfo, dtype: torch.dtype, device: torch.device
    ) -> DocumentAttention:
        alibi = self._kind == "alibi"
        if documents.rules.flex is not None:
            if alibi and (self._slopes_there is None or self._slopes_there.device != device):
                self._slopes_there = torch.tensor(self._slopes, device=device)
            return DocumentFlexAttention(
                documents.rules.flex, documents.doc_ids_BS, self._slopes_there
            )
        lengths = row_lengths(documents.doc_ids_BS)
        if not alibi:
            return PerDocumentSDPA(lengths)
        # Distances are the same in every document: one table, as wide as the longest so far.
        longest = max(max(row) for row in lengths)
        self._longest_document = max(longest, self._longest_document)
        width = self._longest_document
        return PerDocumentSDPA(lengths, self._alibi(width, width, dtype, device))

    def _alibi(
        self, queries: int, keys: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        key = (queries, keys, dtype, device)
        if self._alibi_bias is None or self._alibi_key != key:
            self._alibi_bias = alibi_bias(self._slopes, queries, keys, device).to(dtype)
            self._alibi_key = key
        return self._alibi_bias


def visible_keys(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[S, L] bool: the causal mask of the last `queries` of `keys` tokens (aligned
    bottom right).
    """
    positions = torch.arange(keys, device=device)
    return positions <= positions[keys - queries :].unsqueeze(1)


def rope_table(
    length: int, rotated: int, base: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary positions (Su et al. 2021), each [length, 1, 1, rotated], fp32.

    The halves of a head are paired, as in GPT-NeoX and Megatron: dimension i turns with i + rotated
    / 2.
    """
    # Integers first: deepspeed.zero.Init makes floating-point constructors return bf16.
    steps = torch.arange(0, rotated, 2, device=device).float() / rotated
    positions = torch.arange(length, device=device).float()
    angles = torch.outer(positions, base**-steps)
    angles = torch.cat([angles, angles], dim=-1).view(length, 1, 1, rotated)
    return angles.cos(), angles.sin()


def rotate(x_SBND: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the first R dimensions of each head by its position; computed in fp32."""
    cos, sin = rotation
    size = cos.shape[-1]
    turned = x_SBND[..., :size].float()
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    turned = turned.to(x_SBND.dtype)
    return turned if size == x_SBND.shape[-1] else torch.cat([turned, x_SBND[..., size:]], dim=-1)


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al. 2022, with their rule for odd numbers of heads)."""

    def geometric(count: int) -> list[float]:
        ratio = 2.0 ** (-8.0 / count)
        return [ratio ** (index + 1) for index in range(count)]

    power = 2 ** int(math.log2(heads))
    return geometric(power) + geometric(2 * power)[0::2][: heads - power]


def alibi_bias(slopes: list[float], queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[n, S, L] in fp32: minus slope x distance where a key is visible, -inf where it is not."""
    positions = torch.arange(keys, device=device)
    distance = (positions - positions[keys - queries :].unsqueeze(1)).float()
    bias = torch.stack([distance * slope for slope in slopes])
    return bias.masked_fill(~visible_keys(queries, keys, device), -torch.inf)
