"""Decides before the optimizer step whether a step exceeds the limits of its plan.

The limits come from `schedules.spike_limits`. Every rank compares the same two numbers, so all of
them skip the same steps.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.engine.deepspeed_patches import skip_step_if
from megatron_ds.train_state import SpikeLimits


class SpikeGuard:
    """Compares one step with its limits.

    Args:
        limits: Limits of the step. None: every step is applied.
    """

    def __init__(self, limits: SpikeLimits | None) -> None:
        self._limits = limits
        self.losses: list[Tensor] = []
        """Losses of this rank's micro-batches, on the device."""
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
        loss = torch.stack(self.losses).mean()
        values = torch.stack([loss, torch.as_tensor(norm, device=loss.device)]).double()
        # One sum over all ranks, so that not even a rounding error can make them disagree.
        # Model-parallel ranks have the same loss.
        dist.all_reduce(values)
        mean_loss, mean_norm = map(float, values / dist.get_world_size())
        self.compared = mean_loss, mean_norm
        self.is_spike = mean_loss > self._limits.loss or mean_norm > self._limits.grad_norm
        return self.is_spike
