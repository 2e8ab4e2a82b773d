"""The normalization layers, and the rule that selects their implementation."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.model.declaration.parts import NormSpec
from megatron_ds.model.kernels.apex import apex_class
from megatron_ds.parallel.collectives import sum_of_parts
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


class WideNorm(nn.Module):
    """A norm that reads any type, and whose weight is added to an offset, both in fp32.

    The result has the type of the weight, or of the input without a weight.

    Args:
        spec: Its declaration.
        group: Tensor-parallel group, which shares the dimension if `spec` shards it.
    """

    def __init__(self, spec: NormSpec, group: Group) -> None:
        super().__init__()
        self.is_centered = spec.model.normalization == "LayerNorm" and spec.has_weight
        self.eps = spec.model.norm_epsilon
        self.offset = spec.offset
        self.group = group
        self.reduces = spec.is_sharded and group.size > 1
        shards = group.size if spec.is_sharded else 1
        for weight in spec.weights():
            initial = torch.full([weight.shape[0] // shards], weight.mean)
            self.register_parameter(weight.name, nn.Parameter(initial))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (self._parameters.get(name) for name in ("weight", "bias"))
        dtype = x.dtype if weight is None else weight.dtype
        y = x.float()
        scale = None if weight is None else weight.float() + self.offset
        if self.reduces:
            y = y - self._mean(y) if self.is_centered else y
            y = y * (self._mean(y.square()) + self.eps).rsqrt()
            y = y if scale is None else y * scale
            y = y if bias is None else y + bias
        elif self.is_centered:
            y = F.layer_norm(
                y, y.shape[-1:], scale, None if bias is None else bias.float(), self.eps
            )
        else:
            y = F.rms_norm(y, y.shape[-1:], scale, self.eps)
        return y.to(dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """The mean over the last dimension of all ranks; each rank has the gradient of its part."""
        return sum_of_parts(x.mean(-1, keepdim=True), self.group) / self.group.size


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
    if spec.is_wide:
        norm: nn.Module = WideNorm(spec, group)
    else:
        norm = cls(*weights["weight"].shape, eps=spec.model.norm_epsilon)
    for key, weight in weights.items():
        declare(norm.get_parameter(key), weight, group)
    return norm


def apex_rms_norm() -> type[nn.Module] | None:
    """FusedRMSNorm of NVIDIA's apex; None if it is not installed."""
    return apex_class("apex.normalization", "FusedRMSNorm", "fused_layer_norm_cuda", nn.Module)


def _torch_has_rms_norm() -> bool:
    return hasattr(torch.ops.aten, "_fused_rms_norm")
