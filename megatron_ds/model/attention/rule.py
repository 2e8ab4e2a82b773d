"""Describes the attention of a layer, apart from its weights. Imports no torch."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron_ds.config import ModelConfig


@dataclass(frozen=True)
class Rope:
    """Rotary positions (Su et al. 2021)."""

    base: float
    """Base period."""
    size: int
    """Dimensions of each head that are rotated."""


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
    """Factor of the products of queries and keys. None: 1 / sqrt(D), D the size of a head."""
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
        """Whether the window hides some of so many keys."""
        return self.window is not None and self.window < keys

    def has_mask(self, keys: int) -> bool:
        """Whether scores of so many keys need more than the causal mask."""
        return self.alibi or self.is_windowed(keys)


PLAIN = AttentionRule()


@functools.lru_cache(maxsize=64)
def attention_rules(config: ModelConfig) -> tuple[AttentionRule, ...]:
    """The rule of each layer."""
    scheme, rotated = config.position_embedding_type, int(config.head_dim * config.rotary_percent)
    rope = Rope(config.rotary_base, rotated) if scheme == "rope" else None
    scale, softcap = config.softmax_scale, config.attn_logit_softcapping
    others = scale, softcap, config.softmax_type != "vanilla"
    return tuple(
        AttentionRule(rope, scheme == "alibi", window, *others) for window in config.windows
    )
