"""Options of multi-latent attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import exclusive_problem, option_field, when
from megatron_ds.config.model.sizes import SizesConfig
from megatron_ds.config.problems import Problem

_size = functools.partial(option_field, minimum=1, only_with=when(multi_latent_attention=True))
REFUSED = {
    "add_qkv_bias": False,
    "qk_l2_norm": False,
    "qk_layernorm_scope": "head",
    "softmax_type": "vanilla",
    "attention_output_gate": False,
    "head_wise_attn_gate": False,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}
"""Options that need heads with keys and values of their own, and their values without effect."""


@dataclass(frozen=True)
class LatentConfig(SizesConfig):
    """Multi-latent attention."""

    multi_latent_attention: bool = option_field(False)
    q_lora_rank: int | None = _size(None)
    kv_lora_rank: int = _size(32)
    qk_head_dim: int = _size(128)
    qk_pos_emb_head_dim: int = _size(64)
    v_head_dim: int = _size(128)

    @property
    def head_dim(self) -> int:
        if not self.multi_latent_attention:
            return super().head_dim
        return self.qk_head_dim + self.qk_pos_emb_head_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.v_head_dim if self.multi_latent_attention else self.head_dim

    @property
    def rotated_dim(self) -> int:
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else self.head_dim

    def latent_problems(self) -> Iterator[Problem]:
        """Check that attention with latent vectors has rotary positions and no other form."""
        if not self.multi_latent_attention:
            return
        values = vars(self)
        refused = [name for name, value in REFUSED.items() if values[name] != value]
        if values["num_query_groups"] not in (None, self.num_attention_heads):
            refused.append("num_query_groups")
        for name in refused:
            yield exclusive_problem("multi_latent_attention", name)
        if values["position_embedding_type"] not in ("rope", "yarn"):
            yield Problem("latent-attention-without-rope", settings=self)
