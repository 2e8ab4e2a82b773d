"""The normalization layers, and the rule that selects their implementation."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
from torch import nn

from megatron_ds.model.kernels.apex import apex_class
from megatron_ds.model.spec.parts import NormSpec
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sharding import declare


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


def build_norm(spec: NormSpec, name: str, group: Group) -> nn.Module:
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) over the last dimension.

    Args:
        spec: Its weights.
        name: Canonical name.
        group: Tensor-parallel group.
    """
    weights = spec.named(name)
    cls: Callable[..., nn.Module] = nn.LayerNorm
    if spec.model.normalization == "RMSNorm":
        has_apex = select_norm_kernel("RMSNorm") is NormKernel.APEX
        cls = (apex_rms_norm() if has_apex else None) or nn.RMSNorm
    norm = cls(*weights["weight"].shape, eps=spec.model.norm_epsilon)
    for key, weight in weights.items():
        declare(norm.get_parameter(key), weight, group)
    return norm


def apex_rms_norm() -> type[nn.Module] | None:
    """FusedRMSNorm of NVIDIA's apex; None if it is not installed."""
    return apex_class("apex.normalization", "FusedRMSNorm", "fused_layer_norm_cuda", nn.Module)


def _torch_has_rms_norm() -> bool:
    return hasattr(torch.ops.aten, "_fused_rms_norm")
