"""Documents inside a sample: where each begins, its own positions, attention that stays inside.

A sample is cut out of a stream of documents, so most samples hold several. Megatron's two flags set
what a document sees of those before it: --reset-attention-mask hides them, --reset-position-ids
counts positions from 0 again. Boundaries are read off the tokens where the model is: the
end-of-document token is the last of its document, and the next document begins behind it. No
[S, S] mask is made, neither by the loader nor here: attention runs either over each document by
itself (`DocumentLoop`, which every device can), or through torch's flex attention
(`DocumentBlocks`), which passes over the blocks of scores that no document needs.

Shapes: B micro-batch, S sequence, n this rank's query heads, k its key-value heads, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron_ds.config import ModelConfig

BLOCK = 128
"""Queries and keys of a block of flex attention."""
TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How far, relative to its size, a kernel may be from the loop. fp32 may be computed in TF32."""
FlexAttention = Callable[..., torch.Tensor]
"""torch.nn.attention.flex_attention.flex_attention, compiled."""


@dataclass(frozen=True)
class PackingOptions:
    """What happens at the boundaries of documents in a training run."""

    eod: int
    """Id of the token that ends a document."""
    reset_positions: bool
    """Positions count from each document's first token."""
    reset_attention: bool
    """A token sees its own document alone."""
    flex: FlexAttention | None = None
    """Computes attention where it is given, else the loop does."""
    flex_unavailable_reason: str = ""
    """Why the loop computes attention, in words; empty where nobody asked."""

    def of(self, tokens_BS: torch.Tensor) -> PackedBatchInfo:
        return PackedBatchInfo(self, *find_documents(tokens_BS, self.eod))


@dataclass(frozen=True)
class PackedBatchInfo:
    """The documents of one micro-batch."""

    rules: PackingOptions
    doc_ids_BS: torch.Tensor
    """int32: which document of its row, from 0, a token belongs to."""
    doc_positions_BS: torch.Tensor
    """int64: the token's place in its document, from 0."""

    @property
    def positions_BS(self) -> torch.Tensor | None:
        """The places, if positions count from the beginning of a document."""
        return self.doc_positions_BS if self.rules.reset_positions else None


def find_documents(tokens_BS: torch.Tensor, eod: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of the document, int32, and place in it, int64, of each token; both [B, S].

    An end-of-document token belongs to the document that it ends (Megatron's
    get_ltor_masks_and_position_ids).
    """
    ends = tokens_BS == eod
    numbers = ends.cumsum(1, dtype=torch.int32) - ends.int()
    places = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).expand_as(tokens_BS)
    # The last end before a token, plus one: where its document begins.
    begins = torch.where(ends, places + 1, 0).cummax(1).values.roll(1, 1)
    begins[:, 0] = 0
    return numbers, places - begins


def row_lengths(numbers_BS: torch.Tensor) -> list[list[int]]:
    """Tokens of each row's documents, from the number of each token's. Waits for the device."""
    rows = numbers_BS.cpu()
    return [row.unique_consecutive(return_counts=True)[1].tolist() for row in rows]


class DocumentAttention(Protocol):
    """Causal attention within each document of a micro-batch."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        """[B, n, S, D] of queries, and of keys and values [B, k, S, D], to [B, n, S, D]."""
        ...


@dataclass(frozen=True)
class PerDocumentSDPA:
    """torch's scaled_dot_product_attention, called for each document by itself.

    Documents of the same length share a call.
    """

    lengths: list[list[int]]
    """Tokens of each row's documents."""
    bias_nSS: torch.Tensor | None = None
    """Added to the scores, as the first keys and queries of a document see it; hides the future, if
    it is given. At least as wide as the longest document."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        parts = [self._documents(x) for x in (q, k, v)]
        alike: dict[int, list[int]] = {}
        for index, part in enumerate(parts[0]):
            alike.setdefault(part.shape[1], []).append(index)
        done: list[torch.Tensor] = [q] * len(parts[0])
        for length, members in alike.items():
            queries, keys, values = (torch.stack([part[at] for at in members]) for part in parts)
            bias = None if self.bias_nSS is None else self.bias_nSS[:, :length, :length]
            outputs = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=bias is None,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            for index, output in zip(members, outputs.unbind(), strict=True):
                done[index] = output
        rows, heads, length, size = q.shape
        return torch.cat(done, dim=1).view(heads, rows, length, size).transpose(0, 1)

    def _documents(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[heads, tokens, D] of each document, row by row."""
        rows = zip(x.unbind(), self.lengths, strict=True)
        # One split of a row, not a slice for each document: a slice's gradient is as long as the
        # row.
        return [part for row, lengths in rows for part in row.split(lengths, dim=1)]


class DocumentFlexAttention:
    """torch's flex attention: it computes the blocks of scores that a document needs."""

    def __init__(
        self, flex: FlexAttention, numbers_BS: torch.Tensor, slopes_n: torch.Tensor | None = None
    ) -> None:
        """slopes_n: of alibi, fp32."""
        self._flex = flex
        self._slopes = slopes_n
        self._mask = block_mask(numbers_BS)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        assert dropout == 0.0, "flex attention knows no dropout"
        slopes = self._slopes

        def alibi(
            score: torch.Tensor,
            row: torch.Tensor,
            head: torch.Tensor,
            query: torch.Tensor,
            key: torch.Tensor,
        ) -> torch.Tensor:
            assert slopes is not None
            return score + slopes[head] * (key - query)

        return self._flex(
            q,
            k,
            v,
            score_mod=None if slopes is None else alibi,
            block_mask=self._mask,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def block_mask(numbers_BS: torch.Tensor) -> Any:
    """The BlockMask of causal attention inside documents, from two numbers for each block.

    torch's create_block_mask gives the same from all [S, S] scores: numbers never fall along a row,
    so a block's first and last tell which documents it holds.
    """
    from torch.nn.attention.flex_attention import BlockMask

    length = numbers_BS.shape[1]
    places = torch.arange(-(-length // BLOCK) * BLOCK, device=numbers_BS.device)
    padded = numbers_BS[:, places.clamp(max=length - 1)]
    first, last = padded[:, ::BLOCK], padded[:, BLOCK - 1 :: BLOCK]
    block = places[: first.shape[1]]
    queries, keys = block.unsqueeze(1), block.unsqueeze(0)
    needed = (keys <= queries) & (last.unsqueeze(1) >= first.unsqueeze(2))
    # Whole blocks are not masked element by element; one that is cut short never counts as whole.
    same = first.unsqueeze(1) == last.unsqueeze(2)
    whole = same & (keys < queries) & ((queries + 1) * BLOCK <= length)

    def visible(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (query >= key) & (numbers_BS[row, query] == numbers_BS[row, key])

    return BlockMask.from_kv_blocks(
        *_listed(needed & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks of keys a block of queries has, and which: those first, in order."""
    chosen = blocks.int().unsqueeze(1)
    listed = chosen.argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), listed.int()


def select_flex_attention(
    config: ModelConfig,
    micro_batch: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
    load: Callable[[], FlexAttention] | None = None,
) -> tuple[FlexAttention | None, str]:
    """flex attention, if it computes this run's attention here as the loop does, else why not.

    It is tried out, forwards and backwards, on tensors of the run's shapes and layout: what it is
    compiled for then is what the first step needs. dtype: of the activations. load: gives the
    function to be tried (default: torch's, compiled).
    """
    if config.attention_dropout > 0.0:
        return None, "flex_attention knows no --attention-dropout"
    try:
        flex = _compiled_flex(device) if load is None else load()
        error = _max_relative_error(flex, config, micro_batch, tp_size, dtype, device)
    except Exception as refusal:  # whatever a compiler and a device may raise
        words = str(refusal).strip().partition("\n")[0].partition(". ")[0]
        words = words or type(refusal).__name__
        return None, words if "FlexAttention" in words else f"flex_attention fails here: {words}"
    if not error <= TOLERANCES[dtype]:  # nan, too
        return None, f"flex_attention is wrong by {error:.2g} of the result's size here"
    return flex, ""


def _compiled_flex(device: torch.device) -> FlexAttention:
    """Raises what flex attention raises on a device that it does not train on."""
    from torch.nn.attention.flex_attention import flex_attention

    tiny = torch.zeros((1, 1, 1, 16), device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants to be compiled, which takes seconds to fail
        flex_attention(tiny, tiny, tiny)
    return torch.compile(flex_attention)


def _max_relative_error(
    flex: FlexAttention,
    config: ModelConfig,
    micro_batch: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The largest relative error of flex attention's output and gradients against the loop's."""
    generator = torch.Generator().manual_seed(0)
    numbers = (
        torch.rand((micro_batch, config.seq_length), generator=generator) * config.seq_length < 6
    )
    numbers = numbers.cumsum(1, dtype=torch.int32).to(device)
    local = config.num_attention_heads // tp_size, *[config.kv_heads // tp_size] * 2
    width = sum(local) * config.head_dim
    shape = config.seq_length, micro_batch, width
    x_SBW = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    towards = torch.randn((*shape[:2], local[0], config.head_dim), generator=generator)
    towards = towards.permute(1, 2, 0, 3).to(device, dtype)
    lengths = row_lengths(numbers)
    slopes = bias = None
    if config.position_embedding_type == "alibi":
        slopes = torch.linspace(0.1, 0.5, local[0], device=device)
        # As wide as the longest document: that of all scores can be more than a device holds.
        places = torch.arange(max(map(max, lengths)), device=device)
        distance = places - places.unsqueeze(1)
        bias = (distance * slopes.view(-1, 1, 1)).masked_fill(distance > 0, -torch.inf).to(dtype)
    loop = PerDocumentSDPA(lengths, bias)
    results = []
    for attention in (DocumentFlexAttention(flex, numbers, slopes), loop):
        parts = x_SBW.split([heads * config.head_dim for heads in local], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in parts)
        if config.position_embedding_type == "rope":  # which gives new tensors
            q, k = q.contiguous(), k.contiguous()
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = attention.attend(q, k, v, 0.0)
        (gradient,) = torch.autograd.grad(out, x_SBW, towards)
        results.append((out.detach().float(), gradient.float()))
    return max(
        float((one - other).norm() / other.norm()) for one, other in zip(*results, strict=True)
    )
