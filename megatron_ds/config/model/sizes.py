"""Sizes of the transformer that other options are checked against."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron_ds.config.fields import UNSET_INT, option_field

_required_size = functools.partial(option_field, UNSET_INT, required=True, minimum=1)
size_field = functools.partial(option_field, None, minimum=1)
"""Declares a size whose default follows from others."""


@dataclass(frozen=True)
class SizesConfig:
    """Sizes of the transformer."""

    num_layers: int = _required_size(aliases=("encoder-num-layers",))
    hidden_size: int = _required_size()
    num_attention_heads: int = _required_size()
    kv_channels: int | None = size_field()
    seq_length: int = _required_size(aliases=("encoder-seq-length",))

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a head of which RoPE rotates a fraction."""
        return self.head_dim
