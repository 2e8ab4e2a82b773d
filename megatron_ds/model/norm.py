"""The normalisation layers."""

from __future__ import annotations

from torch import nn

from megatron_ds.config import ModelConfig


def build_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the hidden dimension.

    torch's own: both compute in fp32 inside, whatever the model's type.
    """
    if config.normalization == "RMSNorm":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
