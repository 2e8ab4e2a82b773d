"""Numbers of the host as tensors of the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ds.config.devices import is_host


def to_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """A copy of integers as int64, through page-locked memory, so that the host does not wait."""
    on_host = torch.tensor(numbers, dtype=torch.int64)
    if is_host(device.type) or not torch.accelerator.is_available():
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)
