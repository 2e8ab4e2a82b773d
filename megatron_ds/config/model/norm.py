"""Options of normalization."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config.fields import option_field


@dataclass(frozen=True)
class NormConfig:
    """Normalization."""

    normalization: str = option_field(
        "LayerNorm",
        choices=("LayerNorm", "RMSNorm"),
        synonyms={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"},
    )
    norm_epsilon: float = option_field(1e-5, aliases=("layernorm-epsilon",), above=0)
    apply_layernorm_1p: bool = option_field(False)
    embed_layernorm: bool = option_field(False)
