"""Options of attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import ANY_VALUE, exclusive_problem, option_field, when
from megatron_ds.config.model.latent import LatentConfig
from megatron_ds.config.model.layer_pattern import chosen_layers
from megatron_ds.config.model.sizes import size_field
from megatron_ds.config.problems import Problem

WINDOW = re.compile(r"\s*[\[(]?\s*(-1|\d+)\s*(,\s*(?:-1|\d+)\s*)?[\])]?\s*")
"""The form of `window_size`."""


@dataclass(frozen=True)
class AttentionConfig(LatentConfig):
    """Heads of attention, and the keys that a token attends to."""

    num_query_groups: int | None = size_field(aliases=("num-key-value-heads",))
    window_size: str | None = option_field(None, aliases=("pre-tockens",), metavar="LEFT,RIGHT")
    window_attn_skip_freq: str | None = option_field(
        None, metavar="PATTERN", only_with=when(window_size=ANY_VALUE)
    )
    qk_layernorm: bool = option_field(False)
    qk_layernorm_scope: str = option_field(
        "head", choices=("head", "all-heads"), only_with=when(qk_layernorm=True)
    )
    qk_l2_norm: bool = option_field(False)
    softmax_scale: float | None = option_field(None, above=0)
    attn_logit_softcapping: float | None = option_field(None, above=0, metavar="CAP")
    softmax_type: str = option_field("vanilla", choices=("vanilla", "off-by-one", "learnable"))
    attention_output_gate: bool = option_field(False)
    head_wise_attn_gate: bool = option_field(False)
    attention_dropout: float = option_field(0.1, minimum=0, below=1)

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def window(self) -> int | None:
        """Keys that a token attends to in layers with a window, its own included; None: all."""
        if self.window_size is None:
            return None
        values = WINDOW.fullmatch(self.window_size)
        if values is None:
            raise ValueError
        left, is_alone = int(values[1]), values[2] is None
        return None if left < 0 or (is_alone and left + 1 >= self.seq_length) else left + 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        pattern, layers = self.window_attn_skip_freq, range(1, self.num_layers + 1)
        if pattern is None:
            has_window = [True for _ in layers]
        elif pattern.strip().isdecimal():
            has_window = [layer % int(pattern) != 0 for layer in layers]
        else:
            has_window = [*chosen_layers(pattern, self.num_layers)]
        return tuple(self.window if has else None for has in has_window)

    @property
    def window_pattern(self) -> str | None:
        """A list with 1 for each layer with a window, 0 for the others; None without windows."""
        pattern = [int(window is not None) for window in self.windows]
        return str(pattern) if any(pattern) else None

    @property
    def gate_size(self) -> int:
        """Gates of a token."""
        of_head = self.head_dim if self.attention_output_gate else int(self.head_wise_attn_gate)
        return self.num_attention_heads * of_head

    def attention_problems(self) -> Iterator[Problem]:
        """Check the norms of queries and keys, the gates, the window and its pattern."""
        if self.qk_layernorm and self.qk_l2_norm:
            yield exclusive_problem("qk_layernorm", "qk_l2_norm")
        yield from self.latent_problems()
        if self.attention_output_gate and self.head_wise_attn_gate:
            yield exclusive_problem("attention_output_gate", "head_wise_attn_gate")
        try:
            _ = self.window
        except ValueError:
            return (yield Problem("window-malformed", settings=self))
        try:
            _ = self.windows
        except (ValueError, ZeroDivisionError):
            yield Problem("window-pattern-malformed", settings=self, layers=self.num_layers)
