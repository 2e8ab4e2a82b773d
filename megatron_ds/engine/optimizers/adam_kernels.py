"""Implementations of AdamW: the rule that selects one, and the search for those that are there.

All of them make one pass over the flat fp32 states, except `TORCH`, which is everywhere and defines
the result. The rule prefers torch's own: it needs neither a compiler nor another package, so that a
checkpoint continues with the same one on another machine.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

from megatron_ds.config.devices import is_host
from megatron_ds.model.kernels.apex import apex_class


class AdamKernel(StrEnum):
    """Names as in `EngineSettings.optimizer`."""

    TORCH_FUSED = "AdamW (fused)"
    APEX = "FusedAdam of apex"
    DEEPSPEED = "FusedAdam"
    TORCH = "AdamW"
    CPU = "DeepSpeedCPUAdam"
    """Kernel for states in host memory."""


PREFERENCE = (AdamKernel.TORCH_FUSED, AdamKernel.APEX, AdamKernel.DEEPSPEED)
BY_TYPE = {"fusedadam": AdamKernel.DEEPSPEED, "apexfusedadam": AdamKernel.APEX}
"""`optimizer.type` of a DeepSpeed file, in lower case -> the kernel that it names."""
IsAvailable = Callable[[AdamKernel], bool]


def only_torch(kernel: AdamKernel) -> bool:
    """Whether a kernel is available on a CPU, or where availability is unknown."""
    return kernel is AdamKernel.TORCH_FUSED


def select_adam_kernel(
    name: str,
    torch_adam: bool | None,
    fused: bool | None,
    *,
    offloaded: bool,
    is_available: IsAvailable,
) -> AdamKernel:
    """Select the kernel.

    Args:
        kind: `optimizer.type` of the user's file; "" without one.
        torch_adam: Key of the file; None if it leaves the choice.
        fused: Key of the file; None if it leaves the choice.
        offloaded: Whether the optimizer states are in host memory.
        is_available: Whether a kernel can be used on the device. Called in the order of PREFERENCE.
    """
    if offloaded:
        return AdamKernel.CPU
    named = BY_TYPE.get(name.lower())
    if torch_adam is None and named is not None:
        return named
    if torch_adam is False:
        return named or AdamKernel.DEEPSPEED
    if fused is not None:
        return AdamKernel.TORCH_FUSED if fused else AdamKernel.TORCH
    candidates = PREFERENCE[:1] if torch_adam else PREFERENCE
    return next(filter(is_available, candidates), AdamKernel.TORCH)


def available_on(device: str) -> IsAvailable:
    """Looks for kernels on a kind of device, when they are asked for."""

    def is_available(kernel: AdamKernel) -> bool:
        if kernel is AdamKernel.TORCH_FUSED:
            return device in _torch_fused_devices()
        if kernel is AdamKernel.APEX:
            return not is_host(device) and apex_adam() is not None
        return kernel is AdamKernel.DEEPSPEED and not is_host(device) and _can_build_fused_adam()

    return is_available


def apex_adam() -> type[Any] | None:
    """FusedAdam of NVIDIA's apex; None if it is not installed."""
    from torch.optim import Optimizer

    return apex_class("apex.optimizers", "FusedAdam", "amp_C", Optimizer)


def _torch_fused_devices() -> list[str]:
    from torch.utils import _foreach_utils  # not public; the optimizers themselves ask it

    return list(_foreach_utils._get_fused_kernels_supported_devices())


def _can_build_fused_adam() -> bool:
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder("FusedAdamBuilder")
    return builder is not None and bool(builder.is_compatible(verbose=False))
