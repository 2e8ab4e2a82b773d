"""Normalization layers on an accelerator equal their definition on the CPU in fp64."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.model.norm import apex_rms_norm, build_norm

EPSILON = 1e-2
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def plain(x: Tensor, weight: Tensor, normalization: str) -> Tensor:
    centered = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    return centered / (centered.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


@pytest.mark.gpu(reason="kernels of the device are compared with the CPU")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("implementation", ["LayerNorm", "RMSNorm", "apex"])
def test_norm_equals_its_definition(implementation: str, dtype: torch.dtype) -> None:
    device = torch.device(get_accelerator().current_device_name())
    normalization = "LayerNorm" if implementation == "LayerNorm" else "RMSNorm"
    if implementation == "apex":
        kind = apex_rms_norm()
        if kind is None:
            pytest.skip("NVIDIA's apex is not installed")
        norm = kind(64, eps=EPSILON)
    else:
        norm = build_norm(
            ModelConfig(hidden_size=64, norm_epsilon=EPSILON, normalization=normalization)
        )
    norm = norm.to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(s, generator=generator).to(dtype) for s in ((5, 64), (64,), (5, 64))]
    x, weight, grad = (value.double() for value in values)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    expected = plain(x, weight, normalization)
    exact = [expected, *torch.autograd.grad(expected, (x, weight), grad)]
    norm.weight.data.copy_(values[1])
    ours_x = values[0].to(device).requires_grad_()
    out = norm(ours_x)
    found = [out, *torch.autograd.grad(out, (ours_x, norm.weight), values[2].to(device))]
    for ours, theirs in zip(found, exact, strict=True):
        assert (ours.cpu().double() - theirs).norm() < TOLERANCES[dtype] * theirs.norm()
