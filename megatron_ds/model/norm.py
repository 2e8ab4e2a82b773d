"""The normalization layers, and the rule that selects their implementation."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import nn

from megatron_ds.config import ModelConfig
from megatron_ds.model.apex import apex_class


class NormKernel(StrEnum):
    """Implementations with the same result, which is computed in fp32 whatever the model's type."""

    TORCH_FUSED = "torch's kernel"
    APEX = "FusedRMSNorm of apex"
    TORCH = "torch's operators"


def select_norm_kernel(normalization: str) -> NormKernel:
    """Select the implementation of --normalization.

    Torch has a kernel for LayerNorm, and since version 2.9 one for RMSNorm. Before, RMSNorm is
    several operators, which NVIDIA's apex replaces by one kernel where it is installed.
    """
    if normalization == "LayerNorm" or _torch_has_rms_norm():
        return NormKernel.TORCH_FUSED
    return NormKernel.TORCH if apex_rms_norm() is None else NormKernel.APEX


def build_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the hidden dimension."""
    if config.normalization == "LayerNorm":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
    kernel = select_norm_kernel(config.normalization)
    kind = apex_rms_norm() if kernel is NormKernel.APEX else None
    return (kind or nn.RMSNorm)(config.hidden_size, eps=config.norm_epsilon)


def apex_rms_norm() -> type[nn.Module] | None:
    """FusedRMSNorm of NVIDIA's apex; None if it is not installed."""
    return apex_class("apex.normalization", "FusedRMSNorm", "fused_layer_norm_cuda", nn.Module)


def _torch_has_rms_norm() -> bool:
    return hasattr(torch.ops.aten, "_fused_rms_norm")
