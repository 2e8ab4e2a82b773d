"""The normalization layers."""

from __future__ import annotations

from torch import nn

from megatron_ds.config import ModelConfig


def build_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the hidden dimension.

    Both of torch's layers compute in fp32, whatever the model's type.
    """
    if config.normalization == "RMSNorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
