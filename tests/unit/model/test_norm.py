"""The rule that selects an implementation of the normalization layers.

Claim (precision): RMSNorm is computed by torch's kernel, or by apex's where torch has none
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_ds.config import ModelConfig
from megatron_ds.model import norm
from megatron_ds.model.declaration.parts import NormSpec
from megatron_ds.model.norm import NormKernel, build_norm, select_norm_kernel
from megatron_ds.parallel.mesh import Mesh

CONFIG = ModelConfig(hidden_size=16, norm_epsilon=1e-2)


def build(config: ModelConfig) -> nn.Module:
    return build_norm(NormSpec(config), "final_norm", Mesh.single().tp)


class StandIn(nn.RMSNorm):
    """Has the interface of apex's FusedRMSNorm."""


def install_apex(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    monkeypatch.setitem(sys.modules, "apex", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "apex.normalization", SimpleNamespace(FusedRMSNorm=found))
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", SimpleNamespace())


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_kernel_of_torch_is_preferred(monkeypatch: pytest.MonkeyPatch, normalization: str) -> None:
    install_apex(monkeypatch, StandIn)
    monkeypatch.setattr(norm, "_torch_has_rms_norm", lambda: True)
    assert select_norm_kernel(normalization) is NormKernel.TORCH_FUSED
    built = build(dataclasses.replace(CONFIG, normalization=normalization))
    assert type(built) is getattr(nn, normalization)


def test_apex_replaces_operators_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "_torch_has_rms_norm", lambda: False)
    config = dataclasses.replace(CONFIG, normalization="RMSNorm")
    assert select_norm_kernel("RMSNorm") is NormKernel.TORCH
    plain = build(config)
    install_apex(monkeypatch, StandIn)
    assert select_norm_kernel("RMSNorm") is NormKernel.APEX
    fused = build(config)
    assert (type(plain), type(fused)) == (nn.RMSNorm, StandIn)
    assert plain.state_dict().keys() == fused.state_dict().keys()
    x = torch.randn(3, 16)
    assert torch.equal(fused(x), plain(x))
