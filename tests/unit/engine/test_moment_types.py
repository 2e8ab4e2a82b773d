"""The step of AdamW with moments in bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_ds.engine.optimizers import adamw
from tests.unit.engine.test_muon import SETTINGS, stepped

BF16 = torch.bfloat16
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, **SETTINGS}


def start() -> nn.Parameter:
    return nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_rounds_its_moments_after_each_step(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (precision): moments in bf16 are torch's AdamW with moments that are rounded after each
    step"""
    monkeypatch.setattr(adamw, "CHUNK", 10)
    types = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    found = stepped(adamw.AdamW([{"params": [start()]}], fused=fused, **types, **ADAM))
    weight = start()
    reference = torch.optim.AdamW([weight], fused=fused, **ADAM)

    def round_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            values = optimizer.state[weight][name]
            values.copy_(values.to(BF16))

    reference.register_step_post_hook(round_moments)
    expected = stepped(reference)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    exact = stepped(torch.optim.AdamW([start()], fused=fused, **ADAM))
    assert not torch.allclose(found, exact, rtol=1e-6, atol=1e-7)
