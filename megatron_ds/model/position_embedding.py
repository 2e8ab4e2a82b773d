"""Position embeddings in attention: rope's rotation, and the contexts of a forward pass.

Learned positions belong to the embedding. The table of a rotation is a plain fp32 tensor made on
first use (not a buffer, which an engine would cast) and kept by the encoder.

Shapes: S queries, R rotated part of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention.backends import CALLERS, AttentionOptions
from megatron_ds.model.attention.cores import AttentionCore, UlyssesAttention
from megatron_ds.model.attention.masks import MaskTables, alibi_slopes
from megatron_ds.model.attention.packed import Keys
from megatron_ds.model.attention.rule import AttentionRule, Llama3Scaling, Rope, YarnScaling
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.ulysses import local_slice


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
        mesh: Its tensor-parallel ranks and, inside attention, its sequence-parallel ranks share
            the heads.
        attention: What computes attention.
    """

    def __init__(
        self, config: ModelConfig, mesh: Mesh, attention: AttentionOptions = CALLERS
    ) -> None:
        self._attention = attention
        self.max_length = config.seq_length
        self._sp = mesh.sp
        shards, shard = mesh.tp.size * mesh.sp.size, mesh.tp.rank * mesh.sp.size + mesh.sp.rank
        local = config.num_attention_heads // shards
        slopes = alibi_slopes(config.num_attention_heads)
        self._masks = MaskTables(slopes[shard * local : (shard + 1) * local])
        self._rope_tables: dict[Rope, Rotation] = {}

    @property
    def tables(self) -> tuple[object, ...]:
        """Tables that contexts refer to, and other contexts may replace."""
        return *self._rope_tables.values(), self._masks.device_slopes

    def contexts(
        self, rules: Iterable[AttentionRule], keys: Keys
    ) -> dict[AttentionRule, AttentionContext]:
        """The context of each distinct rule."""
        rotations: dict[Rope | None, Rotation | None] = {None: None}
        contexts = {}
        for rule in dict.fromkeys(rules):
            if rule.rope is not None and rule.rope not in rotations:
                rotations[rule.rope] = self._rotation(rule.rope, keys)
            core = self._attention.backend(rule, keys).core(rule, keys, self._masks)
            core = core if self._sp.size == 1 else UlyssesAttention(core, self._sp)
            contexts[rule] = AttentionContext(rotations[rule.rope], core)
        return contexts

    def _rotation(self, rope: Rope, keys: Keys) -> Rotation:
        """This rank's rows of the table."""
        start, end, positions_BS = keys.offset, keys.offset + keys.queries, keys.positions_BS
        table, local = self._rope_tables.get(rope), local_slice(keys.queries, self._sp)
        if table is None or table[0].device != keys.device or table[0].shape[0] < end:
            table = rope_table(max(end, self.max_length), rope, keys.device)
            self._rope_tables[rope] = table
        cos, sin, is_interleaved = table
        if positions_BS is None:
            return Rotation(cos[start:end][local], sin[start:end][local], is_interleaved)
        cos, sin = (part[positions_BS.t()].squeeze(2)[local] for part in (cos, sin))
        return Rotation(cos, sin, is_interleaved)


def rope_rates(rope: Rope, device: torch.device) -> Tensor:
    """Angle per position of each pair of dimensions, [R / 2], fp32."""
    # Integers first: deepspeed.zero.Init makes floating-point constructors return bf16.
    steps = torch.arange(0, rope.size, 2, device=device).float() / rope.size
    rates, scaling = rope.base**-steps, rope.scaling
    if scaling is None:
        return rates
    kept: Tensor | float = 0.0
    if isinstance(scaling, Llama3Scaling):
        rotations = rates * (8192 / (2 * math.pi))
        kept = ((rotations - 1) / (4 - 1)).clamp(0, 1)
    elif isinstance(scaling, YarnScaling):
        low, high = scaling.bounds(rope)
        pairs = torch.arange(rope.size // 2, device=device).float()
        kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return rates * kept + rates / scaling.factor * (1 - kept)


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
    cos, sin = angles.cos(), angles.sin()
    if rope.scaling is not None:
        cos, sin = cos * rope.scaling.amplitude, sin * rope.scaling.amplitude
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
