"""Which elements cautious weight decay decays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import AdamW

from megatron_ds.engine.optimizers.cautious_decay import decay_cautiously
from megatron_ds.engine.optimizers.lion import Lion


@pytest.mark.parametrize("optimizer_type", [AdamW, Lion])
def test_elements_decay_that_this_steps_update_moves_towards_zero(
    optimizer_type: Any,
) -> None:
    """The sign of the update is that of the momentum with this step's gradient, which differs from
    the momentum before it where a large gradient turns.

    Claim (precision): cautious weight decay of AdamW and Lion is that of its paper, in every step
    """
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(200, generator=generator)
    rate = 0.01
    beta = 0.9
    beta2 = 0.99
    decay = 0.5
    weight = torch.nn.Parameter(start.clone())
    optimizer = optimizer_type([weight], lr=rate, betas=(beta, beta2), weight_decay=decay)
    decay_cautiously(optimizer)
    found = start.double()
    momentum = torch.zeros(200).double()
    second = torch.zeros(200).double()
    turned = 0
    for step in range(1, 5):
        gradient = torch.randn(200, generator=generator) * 10.0 ** (step - 1)
        weight.grad = gradient.clone()
        optimizer.step()
        gradient = gradient.double()
        update = beta * momentum + (1 - beta) * gradient
        turned += int((update * momentum < 0).sum())
        second = beta2 * second + (1 - beta2) * gradient.square()
        if optimizer_type is Lion:
            momentum = beta2 * momentum + (1 - beta2) * gradient
            moved = update.sign()
        else:
            deviation = (second / (1 - beta2**step)).sqrt() + 1e-8
            momentum = update
            moved = update / (1 - beta**step) / deviation
        found = found - rate * (moved + decay * found * (update * found >= 0))
        torch.testing.assert_close(weight.detach().double(), found, rtol=1e-5, atol=1e-6)
    assert turned > 100
    assert optimizer.param_groups[0]["weight_decay"] == decay
