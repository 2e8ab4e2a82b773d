"""Packed samples: document boundaries, positions within documents, intra-document attention.

A sample is a slice of a stream of documents, so most samples contain several. Megatron's two flags
determine what a document sees of earlier ones: --reset-attention-mask hides them,
--reset-position-ids restarts positions. Which tokens end documents is known to whoever reads the
samples. No [S, S] mask is built: attention runs
over each document separately (`PerDocumentSDPA`, on every device), or through a kernel that leaves
out the scores between documents: torch's variable-length attention or its flex attention.

Shapes: B micro-batch, S sequence, n this rank's query heads, k its key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.model.attention.cores import (
    SDPA,
    VARYING_SIZES,
    AttentionCore,
    Order,
    backends_in_order,
)
from megatron_ds.model.attention.masks import MaskTables, block_mask
from megatron_ds.model.attention.rule import PLAIN, AttentionRule

DOCUMENT_UNIT = 16
"""The number of documents of variable-length attention is a multiple."""
FlexAttention = Callable[..., Tensor]
"""torch.nn.attention.flex_attention.flex_attention, compiled."""


VarlenAttention = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Causal attention of concatenated sequences: queries [T, n, D], keys and values [T, k, D], the
first token of each sequence and T, int32, and the length of the longest to [T, n, D]."""


@dataclass(frozen=True)
class PackingOptions:
    """Treatment of document boundaries in a training run."""

    reset_positions: bool
    """Positions restart at each document's first token."""
    reset_attention: bool
    """A token sees its own document only."""

    def documents(self, last_BS: Tensor, max_documents: int | None = None) -> Documents:
        """The documents of a micro-batch.

        Args:
            last_BS: Whether a token is the last one of its document.
            max_documents: Upper bound of the number of documents, if the host knows one.
        """
        return Documents(self, last_BS, *find_documents(last_BS), max_documents)


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch: of complete sequences, before ranks take their slices."""

    options: PackingOptions
    last_BS: Tensor
    """bool: whether the token is the last one of its document."""
    doc_ids_BS: Tensor
    """int32: number of the token's document in its row, from 0."""
    doc_positions_BS: Tensor
    """int64: position of the token in its document, from 0."""
    max_documents: int | None = None
    """Upper bound of the number of documents in all rows; None: known to the device only."""

    @property
    def positions_BS(self) -> Tensor | None:
        """Positions of the tokens where they restart with a document, else None."""
        return self.doc_positions_BS if self.options.reset_positions else None

    @property
    def attended_BS(self) -> Tensor | None:
        """Numbers of the tokens' documents where attention ends with them, else None."""
        return self.doc_ids_BS if self.options.reset_attention else None

    def truncated(self, length: int) -> Documents:
        """The documents of the first `length` tokens of each sequence."""
        return replace(
            self,
            last_BS=self.last_BS[:, :length],
            doc_ids_BS=self.doc_ids_BS[:, :length],
            doc_positions_BS=self.doc_positions_BS[:, :length],
        )


def _no_positions(window: int | None) -> None:
    return None


@dataclass(frozen=True)
class Keys:
    """Properties of a forward pass that attention backends depend on."""

    queries: int
    """Tokens of this pass, of all sequence-parallel ranks."""
    dtype: torch.dtype
    """Type of the activations."""
    device: torch.device
    has_documents: bool = False
    """Attention ends with a document."""
    documents: Documents | None = None
    """Documents of the tokens, if their boundaries matter; without a cache."""
    positions_BS: Tensor | None = None
    """Positions of the tokens, where they are not offset, offset + 1, ..."""
    offset: int = 0
    """Tokens before them, in the cache; the most of any row."""
    num_keys: int | None = None
    """Keys of the cache. With `positions_BS`, a token sees those up to its position."""
    is_wider: bool = False
    """They are in fp32, and the activations are not."""
    positions_of: Callable[[int | None], Tensor | None] = _no_positions
    """Positions of a cache's keys in layers with a window, [B or 1, L]; None: from 0 on."""


class AttentionBackend(Protocol):
    """One way to compute attention."""

    name: str
    is_traceable: bool
    """Whether torch.compile can include its core in a graph."""

    def supports(self, rule: AttentionRule, keys: Keys) -> bool:
        """Whether it computes this attention."""
        ...

    def core(self, rule: AttentionRule, keys: Keys, tables: MaskTables) -> AttentionCore:
        """The attention core of a forward pass."""
        ...


def find_documents(is_end: Tensor) -> tuple[Tensor, Tensor]:
    """Find each token's document and its position there, from which tokens [B, S] end one.

    An end-of-document token belongs to the document that it ends, as in Megatron's
    get_ltor_masks_and_position_ids.

    Returns:
        Number of the document, int32, and position in it, int64; both [B, S].
    """
    doc_ids = is_end.cumsum(1, dtype=torch.int32) - is_end.int()
    positions = torch.arange(is_end.shape[1], device=is_end.device).expand_as(is_end)
    # A document starts one after the last end before its tokens.
    starts = torch.where(is_end, positions + 1, 0).cummax(1).values.roll(1, 1)
    starts[:, 0] = 0
    return doc_ids, positions - starts


def document_lengths(doc_ids_BS: Tensor) -> list[list[int]]:
    """Tokens of each row's documents. Synchronizes with the device."""
    rows = doc_ids_BS.cpu()
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in rows]


@dataclass(frozen=True)
class PerDocumentSDPA:
    """torch's scaled_dot_product_attention, called for each document separately.

    Documents of the same length share a call.
    """

    lengths: list[list[int]]
    """Tokens of each row's documents."""
    bias_nSS: Tensor | None = None
    """Added to the scores of a document's first keys and queries; must hide the future. At least as
    wide as the longest document."""
    backends: Order = VARYING_SIZES
    """Kernels to consider on a device."""
    scale: float | None = None
    """Scale of the scores from the rule; None for 1 / sqrt(D)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        assert not sinks_n
        parts = [self._split(x) for x in (q, k, v)]
        by_length: dict[int, list[int]] = {}
        for index, part in enumerate(parts[0]):
            by_length.setdefault(part.shape[1], []).append(index)
        attended: list[Tensor] = [q] * len(parts[0])
        with backends_in_order(self.backends, q.device):
            for length, members in by_length.items():
                queries, keys, values = (
                    torch.stack([part[at] for at in members]) for part in parts
                )
                bias = None if self.bias_nSS is None else self.bias_nSS[:, :length, :length]
                core = SDPA(bias, bias is None, scale=self.scale)
                outputs = core.attend(queries, keys, values, dropout)
                for index, output in zip(members, outputs.unbind(), strict=True):
                    attended[index] = output
        rows, heads, length, _ = q.shape
        return torch.cat(attended, dim=1).view(heads, rows, length, -1).transpose(0, 1)

    def _split(self, x: Tensor) -> list[Tensor]:
        """[heads, tokens, D] of each document, row by row."""
        rows = zip(x.unbind(), self.lengths, strict=True)
        # One split of a row instead of a slice per document: the gradient of every slice would be
        # as long as the row.
        return [part for row, lengths in rows for part in row.split(lengths, dim=1)]


@dataclass(frozen=True)
class PerDocumentBackend:
    """torch's scaled_dot_product_attention, called for each document separately."""

    order: Order = VARYING_SIZES
    """Kernels to consider on a device."""
    name = "torch's scaled_dot_product_attention per document"
    is_traceable = False

    def supports(self, rule: AttentionRule, keys: Keys) -> bool:
        return keys.has_documents and not rule.needs_scores

    def core(self, rule: AttentionRule, keys: Keys, tables: MaskTables) -> AttentionCore:
        assert keys.documents is not None
        lengths = document_lengths(keys.documents.doc_ids_BS)
        bias = tables.document_bias(rule, max(map(max, lengths)), keys.dtype, keys.device)
        return PerDocumentSDPA(lengths, bias, self.order, rule.scale)


@dataclass(frozen=True)
class VarlenKernel:
    """torch's variable-length attention: flash attention over concatenated documents."""

    varlen: VarlenAttention
    name = "torch's varlen_attn"
    is_traceable = True

    @staticmethod
    def supports(rule: AttentionRule, keys: Keys) -> bool:
        return keys.has_documents and not rule.alibi and not rule.needs_scores

    def core(self, rule: AttentionRule, keys: Keys, tables: MaskTables) -> AttentionCore:
        assert keys.documents is not None
        starts_BS = keys.documents.doc_positions_BS == 0
        # Without the bound from the host, the host must wait for the device here.
        bound = keys.documents.max_documents or int(starts_BS.sum())
        # Rounded, so that temporary memory, which depends on it, has few different sizes.
        bound = -(-bound // DOCUMENT_UNIT) * DOCUMENT_UNIT
        return DocumentVarlenAttention(self.varlen, sequence_starts(starts_BS, bound))


def sequence_starts(starts_BS: Tensor, bound: int) -> Tensor:
    """Index of each document's first token among all tokens, then the number of tokens.

    The kernel's convention: one more entry than documents, int32. Entries up to `bound` + 1 repeat
    the number of tokens, as empty documents. Does not synchronize with the device.

    Args:
        starts_BS: Whether a token is the first of its document.
        bound: Upper bound of the number of documents.
    """
    total = starts_BS.numel()
    index = torch.arange(total, device=starts_BS.device, dtype=torch.int32)
    # Sorted, because only the device knows how many there are.
    ordered = torch.where(starts_BS.flatten(), index, total).sort().values[:bound]
    return F.pad(ordered, (0, bound + 1 - ordered.numel()), value=total)


@dataclass(frozen=True)
class DocumentVarlenAttention:
    """Variable-length attention over the documents of one micro-batch."""

    varlen: VarlenAttention
    starts: Tensor
    """Starts of the sequences, see `sequence_starts`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        assert not sinks_n
        assert dropout == 0.0, "variable-length attention has no dropout"
        rows, _, length, _ = q.shape
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        out: Tensor = self.varlen(q, k, v, self.starts, length).unflatten(0, (rows, length))
        return out.transpose(1, 2)


@dataclass(frozen=True)
class FlexKernel:
    """torch's flex attention, compiled."""

    flex: FlexAttention
    name = "torch's flex_attention"
    is_traceable = False  # it would be compiled again for the functions of every block mask

    @staticmethod
    def supports(rule: AttentionRule, keys: Keys) -> bool:
        has_mask = keys.has_documents or rule.has_mask(keys.queries)
        return keys.num_keys is None and (has_mask or rule.needs_scores)

    def core(self, rule: AttentionRule, keys: Keys, tables: MaskTables) -> AttentionCore:
        if keys.has_documents:
            assert keys.documents is not None
            mask = block_mask(keys.documents.doc_ids_BS, rule.window)
        else:
            mask = tables.blocks(rule, keys.queries, keys.device)
        return DocumentFlexAttention(self.flex, mask, tables.slopes(rule, keys.device), rule)


@dataclass(frozen=True)
class DocumentFlexAttention:
    """torch's flex attention, which computes only the blocks of scores that a document needs."""

    flex: FlexAttention
    mask: Any
    """Block mask of flex attention, see `block_mask`."""
    slopes_n: Tensor | None = None
    """ALiBi slopes, fp32."""
    rule: AttentionRule = PLAIN

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float, *sinks_n: Tensor) -> Tensor:
        assert dropout == 0.0, "flex attention has no dropout"
        slopes = self.slopes_n
        softcap = self.rule.softcap

        def change(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            score = score if softcap is None else softcap * torch.tanh(score / softcap)
            return score if slopes is None else score + slopes[head] * (key - query)

        attend = partial(
            self.flex,
            score_mod=None if slopes is None and softcap is None else change,
            block_mask=self.mask,
            scale=self.rule.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        if not sinks_n:
            return attend(q, k, v)
        attended: Tensor
        attended, log_sum_BnS = attend(q, k, v, return_lse=True)
        kept_BnS1 = torch.sigmoid(log_sum_BnS - sinks_n[0].unsqueeze(1)).unsqueeze(-1)
        return attended * kept_BnS1.to(q.dtype)
