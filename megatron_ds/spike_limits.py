"""Limits of the loss and the gradient norm of a step, as pure functions of what was recorded.

Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ds.config import Config
from megatron_ds.train_state import SpikeLimits, TrainState

LARGE = 10.0
"""A loss or norm is a spike above this multiple of the largest recorded one."""
RECORDED = 100
"""Last steps that are recorded. Megatron-LM compares with its first hundred values."""
FEWEST = 10
"""Recorded steps from which on there is a limit."""


def spike_limits(config: Config, state: TrainState) -> SpikeLimits | None:
    """The limits of the step after `state`.

    Those of --skip-loss-spikes are the mean of the last steps plus SIGMA standard deviations, as in
    OLMo's skip-step optimizers. Spikes count as well, so that a lasting change of the loss is
    accepted after a few steps. Infinite until half a window is known. Those of
    --check-for-spiky-loss and --check-for-large-grads, a multiple of the largest value, hold until
    the step is repeated.
    """
    sigma = config.optimizer.skip_loss_spikes
    window = config.optimizer.skip_loss_spikes_window
    checked = config.rerun.checked_values
    recent = (state.recent_losses, state.recent_norms)
    if sigma is None and not any(checked):
        return None
    loss, norm = (
        math.inf if sigma is None else _spike_limit(values[-window:], sigma, window)
        for values in recent
    )
    most, most_norm = (
        LARGE * max(values[-RECORDED:]) if is_on and len(values) >= FEWEST else math.inf
        for is_on, values in zip(checked, recent, strict=True)
    )
    kept = max(window if sigma is not None else 0, RECORDED if any(checked) else 0)
    return SpikeLimits(min(loss, most), min(norm, most_norm), kept, (loss, norm))


def _spike_limit(values: Sequence[float], sigma: float, window: int) -> float:
    if len(values) < max(2, window // 2):
        return math.inf
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean + sigma * math.sqrt(variance)
