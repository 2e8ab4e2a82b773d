"""Describes the attention of a layer, apart from its weights. Imports no torch."""

from __future__ import annotations

import functools
import math

from megatron_ds.config import ModelConfig
from megatron_ds.dataclass import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations, for sequences longer than before: linear interpolation of the positions
    (Chen et al. 2023)."""

    factor: float

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        return 1.0


@dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """The scaling of Llama 3.1: of dimensions with fewer than 4 rotations in 8192 tokens, complete
    for those with fewer than one."""


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN (Peng et al. 2023)."""

    length: int
    """Sequence length before."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_rounded: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def amplitude(self) -> float:
        log = math.log(self.factor)
        return (0.1 * self.mscale * log + 1) / (0.1 * self.mscale_all_dim * log + 1)

    @property
    def latent_scale(self) -> float:
        """Factor of the scores of multi-latent attention."""
        return (0.1 * self.mscale_all_dim * math.log(self.factor) + 1) ** 2

    def bounds(self, rope: Rope) -> tuple[float, float]:
        """YaRN's correction range: dimension pairs below it keep their frequency, pairs above it
        are interpolated."""

        def pair(rotations: float) -> float:
            ratio = math.log(self.length / (rotations * 2 * math.pi)) / math.log(rope.base)
            return rope.size / 2 * ratio

        low = pair(self.beta_fast)
        high = pair(self.beta_slow)
        if self.is_rounded:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, rope.size - 1)
        return low, high if high != low else low + 0.001


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021)."""

    base: float
    """Base period."""
    size: int
    """Dimensions of each head that are rotated."""
    is_interleaved: bool = False
    """Whether pairs of neighboring dimensions are rotated, and not dimension i of each half."""
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class AttentionRule:
    """Causal attention of a layer. Layers with equal rules share tables and masks."""

    rope: Rope | None = None
    """Rotation of queries and keys. None: they are not rotated."""
    alibi: bool = False
    """ALiBi's bias is added to the scores."""
    window: int | None = None
    """Keys that a query attends to: its own and those before it. None: all."""
    scale: float | None = None
    """Scale of the scores q k^T. None: 1 / sqrt(D), D the size of a head."""
    softcap: float | None = None
    """c of c tanh(s / c), which replaces a scaled score s before ALiBi's bias (Gemma 2)."""
    sinks: bool = False
    """A learned logit of each head is added to the keys of a softmax, without a value (Xiao et al.
    2023, gpt-oss)."""

    @property
    def needs_scores(self) -> bool:
        """Whether torch's scaled_dot_product_attention lacks it."""
        return self.softcap is not None or self.sinks

    def is_windowed(self, keys: int) -> bool:
        """Whether the window hides any of `keys` keys."""
        return self.window is not None and self.window < keys

    def table_length(self, keys: int) -> int:
        """Side of the bias table for `keys` keys, at most two windows."""
        return keys if self.window is None else min(keys, 2 * self.window)

    def has_mask(self, keys: int) -> bool:
        """Whether the scores of `keys` keys need a mask or bias other than the causal mask."""
        return self.alibi or self.is_windowed(keys)


PLAIN = AttentionRule()


@functools.lru_cache(maxsize=64)
def attention_rules(config: ModelConfig) -> tuple[AttentionRule, ...]:
    """The rule of each layer. Layers of multi-token prediction have the rule of the last layer."""
    ropes = _ropes(config) if config.is_rotary else (None,) * config.num_layers
    has_alibi = config.position_embedding_type == "alibi"
    scale = config.score_scale
    softcap = config.attn_logit_softcapping
    if config.softmax_scale is None and config.multi_latent_attention:
        scale = config.head_dim**-0.5 if scale is None else scale  # not of the cached keys
        scaling = _scaling(config)
        if isinstance(scaling, YarnScaling):
            scale *= scaling.latent_scale
    others = scale, softcap, config.softmax_type != "vanilla"
    rules = tuple(
        AttentionRule(rope, has_alibi, window, *others)
        for rope, window in zip(ropes, config.windows, strict=True)
    )
    return rules + rules[-1:] * config.mtp_num_layers


def _ropes(config: ModelConfig) -> tuple[Rope | None, ...]:
    """The rotation of each layer."""
    scaling = _scaling(config)
    layers = zip(config.rotary_bases, *config.rope_layers.values(), strict=True)
    return tuple(
        None
        if lacks_rope
        else Rope(
            base,
            config.rotated_size,
            config.rotary_interleaved or config.multi_latent_attention,
            scaling if is_scaled else None,
        )
        for base, lacks_rope, is_scaled in layers
    )


def _scaling(config: ModelConfig) -> RopeScaling | None:
    if config.position_embedding_type == "yarn":
        assert config.yarn_original_max_position_embeddings is not None
        return YarnScaling(
            config.rotary_scaling_factor,
            config.yarn_original_max_position_embeddings,
            config.yarn_beta_fast,
            config.yarn_beta_slow,
            config.yarn_correction_range_round_to_int,
            config.mscale,
            config.mscale_all_dim,
        )
    if config.use_rope_scaling:
        return Llama3Scaling(config.rope_scaling_factor)
    factor = config.rotary_seq_len_interpolation_factor
    return None if factor == 1 else RopeScaling(factor)
