"""Which implementation of AdamW is selected, and that apex is recognized by its class.

Claim (precision): AdamW is computed by the first available fused kernel; apex is recognized by its
class
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_ds.engine.optimizers import adam_kernels
from megatron_ds.engine.optimizers.adam_kernels import (
    AdamKernel,
    apex_adam,
    available_on,
    select_adam_kernel,
)
from megatron_ds.launch.environment import prepare_environment

TORCH_FUSED, APEX, DEEPSPEED = adam_kernels.PREFERENCE


def select(
    *available: AdamKernel,
    kind: str = "",
    torch_adam: bool | None = None,
    fused: bool | None = None,
    offloaded: bool = False,
) -> AdamKernel:
    return select_adam_kernel(
        kind, torch_adam, fused, offloaded=offloaded, is_available=lambda one: one in available
    )


def test_the_first_available_kernel_is_selected() -> None:
    assert select(TORCH_FUSED, APEX, DEEPSPEED) is TORCH_FUSED
    assert select(APEX, DEEPSPEED) is APEX
    assert select(DEEPSPEED) is DEEPSPEED
    assert select() is AdamKernel.TORCH


def test_the_file_precedes_the_rule() -> None:
    everything = (TORCH_FUSED, APEX, DEEPSPEED)
    assert select(*everything, kind="FusedAdam") is DEEPSPEED
    assert select(*everything, kind="ApexFusedAdam") is APEX
    assert select(*everything, kind="ApexFusedAdam", torch_adam=False) is APEX
    assert select(*everything, torch_adam=False) is DEEPSPEED
    assert select(*everything, fused=False) is AdamKernel.TORCH
    assert select(APEX, torch_adam=True) is AdamKernel.TORCH
    assert select(*everything, kind="FusedAdam", torch_adam=True) is TORCH_FUSED


@pytest.mark.parametrize("kind", ["", "FusedAdam", "ApexFusedAdam"])
def test_offloaded_states_need_the_kernel_of_the_cpu(kind: str) -> None:
    assert select(TORCH_FUSED, APEX, kind=kind, offloaded=True) is AdamKernel.CPU


class FusedAdam(torch.optim.AdamW):
    """Stands in for apex's."""

    __module__ = "apex.optimizers.fused_adam"

    def __init__(self, params: Any, adam_w_mode: bool = False, **options: Any) -> None:
        super().__init__(params, **options)
        self.adam_w_mode = int(adam_w_mode)


def install(monkeypatch: pytest.MonkeyPatch, found: object, *, compiled: bool = True) -> None:
    for name in ("apex", "apex.optimizers", *(["amp_C"] if compiled else [])):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["apex.optimizers"], "FusedAdam", found, raising=False)


def test_apex_is_recognized_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    assert apex_adam() is None
    install(monkeypatch, FusedAdam)
    assert apex_adam() is FusedAdam
    assert available_on("xpu")(APEX)
    assert not available_on("cpu")(APEX)
    for found in (object, object(), None):  # of another package of the name
        install(monkeypatch, found)
        assert apex_adam() is None


def test_apex_without_its_compiled_part_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FusedAdam, compiled=False)
    assert apex_adam() is None


def test_torch_tells_its_fused_devices() -> None:
    assert available_on("cpu")(TORCH_FUSED)
    assert not available_on("some new device")(TORCH_FUSED)


@pytest.mark.gpu(reason="the fused kernels that are compared run only there")
@pytest.mark.parametrize("kernel", [TORCH_FUSED, APEX, DEEPSPEED])
def test_fused_kernels_equal_plain_adamw(
    kernel: AdamKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    prepare_environment()  # as a run does before it builds an op
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import FusedAdam as DeepSpeedFusedAdam

    device = get_accelerator().device_name()
    if not available_on(device)(kernel):
        pytest.skip(f"{kernel.value} is not available")
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    makers: dict[AdamKernel, Any] = {
        TORCH_FUSED: lambda params: torch.optim.AdamW(params, fused=True, **options),
        APEX: lambda params: apex_adam()(params, adam_w_mode=True, **options),
        DEEPSPEED: lambda params: DeepSpeedFusedAdam(params, adam_w_mode=True, **options),
    }
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(100_003, generator=generator)
    gradients = [torch.randn(100_003, generator=generator) for _ in range(5)]

    def trained(make: Any) -> torch.Tensor:
        weight = torch.nn.Parameter(start.to(device))
        optimizer = make([weight])
        for gradient in gradients:
            weight.grad = gradient.to(device)
            optimizer.step()
        return weight.detach().cpu()

    plain = trained(lambda params: torch.optim.AdamW(params, foreach=False, **options))
    torch.testing.assert_close(trained(makers[kernel]), plain, rtol=1e-5, atol=1e-6)
