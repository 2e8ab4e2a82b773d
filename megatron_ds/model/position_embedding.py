"""Position embeddings in attention: rope's rotation, ALiBi's bias, masks, document boundaries.

Owns the tables and the choice of the attention core. Learned positions belong to the embedding;
here they need the mask only. Tables are plain fp32 tensors made on first use (not buffers, which an
engine would cast) and cached by the encoder.

Shapes: S queries, L keys (S and those of the cache), n this rank's heads, R rotated part of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention_backends import VARYING_SIZES, Order
from megatron_ds.model.attention_cores import (
    SDPA,
    AttentionCore,
    BatchInvariantAttention,
    UlyssesAttention,
)
from megatron_ds.model.packed_attention import (
    DocumentKernel,
    PackedBatchInfo,
    PackingOptions,
    PerDocumentSDPA,
    document_lengths,
)
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.ulysses import local_slice

Rotation = tuple[Tensor, Tensor]
"""Rope's cosines and sines, fp32: each [S, 1, 1, R], or [S, B, 1, R] where positions restart."""


@dataclass(frozen=True)
class AttentionOptions:
    """What computes attention in passes without a cache."""

    samples: Order = ()
    """Kernels to consider for complete samples. Empty: those that the caller has selected."""
    documents: Order = VARYING_SIZES
    """Kernels to consider for one document after the other."""
    alibi: DocumentKernel | None = None
    """Computes ALiBi's bias in the kernel. None: it is a tensor."""


CALLERS = AttentionOptions()


@dataclass(frozen=True)
class AttentionContext:
    """Positions of one forward pass, as every layer's attention needs them."""

    rotation: Rotation | None
    """Rotation of queries and keys; None without rope."""
    core: AttentionCore


class PositionEncoder:
    """Builds the attention context of a forward pass.

    Args:
        config: Architecture.
        mesh: Its tensor-parallel ranks and, inside attention, its sequence-parallel ranks share
            the heads.
        attention: What computes attention.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, attention: AttentionOptions = CALLERS
    ) -> None:
        self._attention = attention
        self._kind = config.position_embedding_type
        self._max_length = config.seq_length
        self._rotated = int(config.head_dim * config.rotary_percent)
        self._base = config.rotary_base
        self._sp = mesh.sp
        shards, shard = mesh.tp.size * mesh.sp.size, mesh.tp.rank * mesh.sp.size + mesh.sp.rank
        local = config.num_attention_heads // shards
        slopes = alibi_slopes(config.num_attention_heads)
        self._slopes = slopes[shard * local : (shard + 1) * local]
        self._rope_table: Rotation | None = None
        self._bias_key: tuple[int, int, torch.dtype, torch.device] | None = None
        self._bias: Tensor | None = None
        self._alibi_core: tuple[int, torch.device, AttentionCore] | None = None
        self._device_slopes: Tensor | None = None
        self._longest_document = 1

    @property
    def tables(self) -> tuple[object, ...]:
        """What contexts refer to, and other contexts may replace."""
        return self._rope_table, self._device_slopes

    def context(
        self,
        queries: int,
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
        packed: PackedBatchInfo | None = None,
        positions_BS: Tensor | None = None,
        num_keys: int | None = None,
        is_wider: bool = False,
    ) -> AttentionContext:
        """Build the context.

        Args:
            queries: Tokens of this pass, those of all sequence-parallel ranks.
            offset: Tokens before them, in the cache; the most of any row.
            dtype: Type of the activations.
            device: Device of the activations.
            packed: Documents of the tokens, if their boundaries matter; needs offset 0.
            positions_BS: Positions of the tokens, where they are not offset, offset + 1, ...
                Without `packed`, a token sees the keys up to its position.
            num_keys: Number of keys of a cache with `positions_BS`.
            is_wider: Whether they are in fp32, and the activations are not.
        """
        rotation = None
        if self._kind == "rope":
            own = local_slice(queries, self._sp)
            cos, sin = self._rotation(queries, offset, device, positions_BS)
            rotation = cos[own], sin[own]
        core: AttentionCore
        if packed is None and positions_BS is not None:
            slopes = self._slopes_on(device) if self._kind == "alibi" else None
            bias_dtype = torch.float32 if is_wider else dtype
            bias = ragged_bias(positions_BS, num_keys or offset + queries, bias_dtype, slopes)
            core = BatchInvariantAttention(bias) if is_wider else SDPA(bias)
        elif packed is not None and packed.options.reset_attention:
            core = self._document_core(packed, dtype, device)
        elif self._kind == "alibi" and self._attention.alibi is not None and offset == 0:
            core = self._core_of(self._attention.alibi, queries, device)
        elif self._kind == "alibi":
            bias = self._alibi(queries, offset + queries, dtype, device)
            core = SDPA(bias, backends=self._attention.samples)
        elif offset == 0:
            core = SDPA(is_causal=True, backends=self._attention.samples)
        else:
            # A single query sees every key, and torch has faster kernels without a mask.
            keys = offset + queries
            core = SDPA(None if queries == 1 else visible_keys(queries, keys, device))
        if self._sp.size > 1:
            core = UlyssesAttention(core, self._sp)
        return AttentionContext(rotation, core)

    def _rotation(
        self, queries: int, offset: int, device: torch.device, positions_BS: Tensor | None
    ) -> Rotation:
        end = offset + queries
        table = self._rope_table
        if table is None or table[0].device != device or table[0].shape[0] < end:
            table = rope_table(max(end, self._max_length), self._rotated, self._base, device)
            self._rope_table = table
        cos, sin = table
        if positions_BS is None:
            return cos[offset:end], sin[offset:end]
        positions_SB = positions_BS.t()
        return cos[positions_SB].squeeze(2), sin[positions_SB].squeeze(2)

    def _document_core(
        self, packed: PackedBatchInfo, dtype: torch.dtype, device: torch.device
    ) -> AttentionCore:
        alibi, kernel = self._kind == "alibi", packed.options.kernel
        if kernel is not None:
            return kernel.core(packed, self._slopes_on(device) if alibi else None)
        lengths = document_lengths(packed.doc_ids_BS)
        if not alibi:
            return PerDocumentSDPA(lengths, backends=self._attention.documents)
        # Distances are the same in every document: one table, as wide as the longest so far.
        self._longest_document = max(self._longest_document, *map(max, lengths))
        width = self._longest_document
        bias = self._alibi(width, width, dtype, device)
        return PerDocumentSDPA(lengths, bias, self._attention.documents)

    def _core_of(self, kernel: DocumentKernel, queries: int, device: torch.device) -> AttentionCore:
        """The core of complete samples, whose mask is kept while their length stays the same."""
        if self._alibi_core is None or self._alibi_core[:2] != (queries, device):
            tokens_BS = torch.ones((1, queries), dtype=torch.int64, device=device)
            packed = PackingOptions(0, False, False).find_documents(tokens_BS)
            core = kernel.core(packed, self._slopes_on(device))
            self._alibi_core = queries, device, core
        return self._alibi_core[2]

    def _slopes_on(self, device: torch.device) -> Tensor:
        """The slopes, kept on the device, because each copy would synchronize with it."""
        if self._device_slopes is None or self._device_slopes.device != device:
            self._device_slopes = torch.tensor(self._slopes, device=device)
        return self._device_slopes

    def _alibi(self, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (queries, keys, dtype, device)
        if self._bias is None or self._bias_key != key:
            self._bias = None  # freed before the next one is allocated
            self._bias = alibi_bias(self._slopes, queries, keys, device, dtype)
            self._bias_key = key
        return self._bias


def visible_keys(queries: int, keys: int, device: torch.device) -> Tensor:
    """Causal mask of the last `queries` of `keys` tokens (aligned bottom right): [S, L] bool."""
    positions = torch.arange(keys, device=device)
    return positions <= positions[keys - queries :].unsqueeze(1)


def ragged_bias(
    positions_BS: Tensor, keys: int, dtype: torch.dtype, slopes_n: Tensor | None = None
) -> Tensor:
    """0, or minus slope x distance, where a key is visible, -inf elsewhere: [B, n or 1, S, L].

    Args:
        positions_BS: Positions of the queries of texts with different lengths, whose keys start at
            position 0.
        keys: Number of keys.
        dtype: Type of the result.
        slopes_n: ALiBi slopes. None: without ALiBi.
    """
    distance_B1SL = (
        torch.arange(keys, device=positions_BS.device) - positions_BS[:, None, :, None]
    ).float()
    bias = distance_B1SL * (0.0 if slopes_n is None else slopes_n[:, None, None])
    return bias.masked_fill_(distance_B1SL > 0, -torch.inf).to(dtype)


def rope_table(length: int, rotated: int, base: float, device: torch.device) -> Rotation:
    """Cosines and sines of rotary positions (Su et al. 2021), each [length, 1, 1, rotated], fp32.

    The halves of a head are paired, as in GPT-NeoX and Megatron: dimension i with i + rotated / 2.
    """
    # Integers first: deepspeed.zero.Init makes floating-point constructors return bf16.
    steps = torch.arange(0, rotated, 2, device=device).float() / rotated
    positions = torch.arange(length, device=device).float()
    angles = torch.outer(positions, base**-steps)
    angles = torch.cat([angles, angles], dim=-1).view(length, 1, 1, rotated)
    return angles.cos(), angles.sin()


def rotate(x_SBND: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first R dimensions of each head by its position; computed in fp32."""
    cos, sin = rotation
    size = cos.shape[-1]
    part = x_SBND[..., :size].float()
    first, second = part.chunk(2, dim=-1)
    part = part * cos + torch.cat([-second, first], dim=-1) * sin
    part = part.to(x_SBND.dtype)
    return part if size == x_SBND.shape[-1] else torch.cat([part, x_SBND[..., size:]], dim=-1)


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al. 2022, with their rule for odd numbers of heads)."""

    def geometric(count: int) -> list[float]:
        ratio = 2.0 ** (-8.0 / count)
        return [ratio ** (index + 1) for index in range(count)]

    power = 2 ** int(math.log2(heads))
    return geometric(power) + geometric(2 * power)[0::2][: heads - power]


def alibi_bias(
    slopes: list[float],
    queries: int,
    keys: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Minus slope x distance where a key is visible, -inf elsewhere: [n, S, L].

    Computed in fp32, one head at a time, because the table of all heads can be large.
    """
    positions = torch.arange(keys, device=device)
    distance = (positions - positions[keys - queries :].unsqueeze(1)).float()
    distance.masked_fill_(~visible_keys(queries, keys, device), -torch.inf)
    bias = torch.empty((len(slopes), queries, keys), dtype=dtype, device=device)
    for head, slope in zip(bias, slopes, strict=True):
        head.copy_(distance * slope)
    return bias
