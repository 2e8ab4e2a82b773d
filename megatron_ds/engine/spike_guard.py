"""Decides before the optimizer step whether a step exceeds the limits of its plan.

The limits come from `spike_limits.spike_limits`. Every rank compares the same two numbers, so all
of them skip the same steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.engine.deepspeed.patches import skip_step_if
from megatron_ds.launch.device import sum_dtype
from megatron_ds.train_state import SpikeLimits


class SpikeGuard:
    """Compares one step with its limits.

    Args:
        limits: Limits of the step. None: every step is applied.
        device: Device of this process.
    """

    def __init__(self, limits: SpikeLimits | None, device: torch.device) -> None:
        self._limits = limits
        self._device = device
        self.losses: list[Tensor] = []
        """Losses of this rank's micro-batches, on the device; none if another stage computes them.
        Ranks of a model-parallel group have the same."""
        self.compared: tuple[float, float] | None = None
        """Mean loss of all ranks and gradient norm, once they are compared."""
        self.is_spike = False

    def skip_spike(self, optimizer: Any) -> AbstractContextManager[None]:
        """Make a ZeRO optimizer's next step skip a spike, once it knows the norm."""
        if self._limits is None:
            return nullcontext()
        return skip_step_if(optimizer, self.exceeds)

    def exceeds(self, norm: Tensor | float) -> bool:
        """Compare the step with its limits. Collective.

        Args:
            norm: Global gradient norm, finite; the same on every rank, but for rounding.
        """
        if self._limits is None:
            return False
        values = torch.zeros(4, dtype=sum_dtype(self._device.type), device=self._device)
        values[2] += norm
        values[3] += 1
        if self.losses:
            values[0] += torch.stack(self.losses).mean()
            values[1] += 1
        # One sum over all ranks, so that not even a rounding error can make them disagree.
        dist.all_reduce(values)
        mean_loss, mean_norm = (values[::2] / values[1::2]).tolist()
        self.compared = mean_loss, mean_norm
        self.is_spike = mean_loss > self._limits.loss or mean_norm > self._limits.grad_norm
        return self.is_spike
