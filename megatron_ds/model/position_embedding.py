"""Position embeddings in attention: rope's rotation, and the contexts of a forward pass.

Learned positions belong to the embedding. The table of a rotation is a plain fp32 tensor made on
first use (not a buffer, which an engine would cast) and kept by the encoder.

Shapes: S queries, R rotated part of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.config.options.parallel import HIERARCHICAL, P2P, kind_of_layer
from megatron_ds.model.attention.backends import CALLERS, AttentionOptions
from megatron_ds.model.attention.context import ContextAttention
from megatron_ds.model.attention.cores import AttentionCore, UlyssesAttention
from megatron_ds.model.attention.masks import MaskTables, alibi_slopes
from megatron_ds.model.attention.packed import Keys
from megatron_ds.model.attention.rule import AttentionRule, Llama3Scaling, Rope, YarnScaling
from megatron_ds.parallel.context.slices import SequenceSlices
from megatron_ds.parallel.mesh import Group, Mesh


class Rotation(NamedTuple):
    """Cosines and sines, fp32: each [S, 1, 1, R], or [S, B, 1, R] where positions restart."""

    cos: Tensor
    sin: Tensor
    is_interleaved: bool = False
    """The two dimensions of a pair are neighbors, not in the two halves."""


@dataclass(frozen=True)
class AttentionContext:
    """Positions of one forward pass, as a layer's attention needs them."""

    rotation: Rotation | None
    """Rotation of queries and keys; None without rope."""
    core: AttentionCore


class PositionEncoder:
    """Builds the attention contexts of a forward pass.

    Args:
        config: Architecture.
        mesh: Its tensor-parallel ranks and, inside attention, its Ulysses ranks share the heads;
            its context-parallel and Ulysses ranks share the sequences.
        attention: Attention backend.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, attention: AttentionOptions = CALLERS
    ) -> None:
        self._attention = attention
        self.max_length = config.seq_length
        self._mesh = mesh
        self._slopes = alibi_slopes(config.num_attention_heads)
        self._masks: dict[int, MaskTables] = {}
        """By the number of ranks of a sequence that share the heads."""
        self._rope_tables: dict[Rope, Rotation] = {}

    @property
    def tables(self) -> tuple[object, ...]:
        """Tables that contexts refer to, and other contexts may replace."""
        masks = (tables.device_slopes for tables in self._masks.values())
        return *self._rope_tables.values(), *masks

    def contexts(
        self, rules: Mapping[int, AttentionRule], keys: Keys
    ) -> dict[int, AttentionContext]:
        """The context of each layer; layers whose attention is the same share one.

        Args:
            rules: Attention rule by number of the layer.
            keys: The forward pass.
        """
        rotations: dict[Rope | None, Rotation | None] = {None: None}
        shared: dict[tuple[AttentionRule, str], AttentionContext] = {}
        contexts = {}
        for layer, rule in rules.items():
            if rule.rope is not None and rule.rope not in rotations:
                rotations[rule.rope] = self._rotation(rule.rope, keys)
            exchange = kind_of_layer(self._attention.exchanges, layer)
            key = rule, exchange  # computing its hash is most of the time, hence once
            if (context := shared.get(key)) is None:
                core = self._core(rule, keys, exchange)
                context = AttentionContext(rotations[rule.rope], core)
                shared[key] = context
            contexts[layer] = context
        return contexts

    def _core(self, rule: AttentionRule, keys: Keys, exchange: str) -> AttentionCore:
        """The core of a rule, for this rank's tokens and heads.

        Args:
            rule: Attention rule.
            keys: The forward pass.
            exchange: Kind of exchange of the context-parallel ranks.
        """
        heads, chunks = self._mesh.sharing_attention(exchange)
        masks = self._masks_of(heads)
        if chunks.size == 1:
            core = self._attention.backend(rule, keys).core(rule, keys, masks)
        else:
            slopes_n = masks.slopes(rule, keys.device)
            documents = keys.documents if keys.has_documents else None
            ids_BS = None if documents is None else documents.doc_ids_BS
            keys_exchange = P2P if exchange == HIERARCHICAL else exchange
            core = ContextAttention(rule, chunks, keys_exchange, slopes_n, ids_BS)
        if heads.size == 1:
            return core
        return UlyssesAttention(core, heads, heads.size // self._mesh.ulysses.size)

    def _masks_of(self, heads: Group) -> MaskTables:
        """The tables of this rank's heads.

        Args:
            heads: Ranks of a sequence that share those of a tensor-parallel rank.
        """
        if heads.size not in self._masks:
            tp = self._mesh.tp
            shard = tp.rank * heads.size + heads.rank
            local = len(self._slopes) // (tp.size * heads.size)
            self._masks[heads.size] = MaskTables(self._slopes[shard * local : (shard + 1) * local])
        return self._masks[heads.size]

    def _rotation(self, rope: Rope, keys: Keys) -> Rotation:
        """This rank's rows of the table."""
        start = keys.offset
        end = keys.offset + keys.queries
        positions_BS = keys.positions_BS
        table = self._rope_tables.get(rope)
        local = SequenceSlices.of(keys.queries, self._mesh.cp, self._mesh.ulysses)
        if table is None or table[0].device != keys.device or table[0].shape[0] < end:
            table = rope_table(max(end, self.max_length), rope, keys.device)
            self._rope_tables[rope] = table
        cos, sin, is_interleaved = table
        if positions_BS is None:
            cos, sin = (local.take(part[start:end], 0) for part in (cos, sin))
            return Rotation(cos, sin, is_interleaved)
        own_BS = local.take(positions_BS, 1)
        cos, sin = (part[own_BS.t()].squeeze(2) for part in (cos, sin))
        return Rotation(cos, sin, is_interleaved)


def rope_rates(rope: Rope, device: torch.device) -> Tensor:
    """Angle per position of each pair of dimensions, [R / 2], fp32."""
    # Integers first: deepspeed.zero.Init makes floating-point constructors return bf16.
    steps = torch.arange(0, rope.size, 2, device=device).float() / rope.size
    rates = rope.base**-steps
    scaling = rope.scaling
    if scaling is None:
        return rates
    unscaled: Tensor | float = 0.0
    if isinstance(scaling, Llama3Scaling):
        rotations = rates * (8192 / (2 * math.pi))
        unscaled = ((rotations - 1) / (4 - 1)).clamp(0, 1)
    elif isinstance(scaling, YarnScaling):
        low, high = scaling.bounds(rope)
        pairs = torch.arange(rope.size // 2, device=device).float()
        unscaled = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return rates * unscaled + rates / scaling.factor * (1 - unscaled)


def rope_table(length: int, rope: Rope, device: torch.device) -> Rotation:
    """Cosines and sines of rotary positions (Su et al. 2021), each [length, 1, 1, R], fp32.

    Dimension i is paired with i + R / 2, as in GPT-NeoX and Megatron, or its neighbor, as in GPT-J.
    """
    positions = torch.arange(length, device=device).float()
    angles = torch.outer(positions, rope_rates(rope, device))
    if rope.is_interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat([angles, angles], dim=-1)
    angles = angles.view(length, 1, 1, rope.size)
    cos = angles.cos()
    sin = angles.sin()
    if rope.scaling is not None:
        cos = cos * rope.scaling.amplitude
        sin = sin * rope.scaling.amplitude
    return Rotation(cos, sin, rope.is_interleaved)


def rotate(x_SBND: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first R dimensions of each head by its position; computed in fp32."""
    cos, sin, is_interleaved = rotation
    size = cos.shape[-1]
    part = x_SBND[..., :size].float()
    if is_interleaved:
        first, second = part.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([-second, first], dim=-1).flatten(-2)
    else:
        first, second = part.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
    part = part * cos + turned * sin
    part = part.to(x_SBND.dtype)
    return part if size == x_SBND.shape[-1] else torch.cat([part, x_SBND[..., size:]], dim=-1)
