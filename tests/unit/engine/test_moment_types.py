"""Moments in bf16: the step, and that they are loaded as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ds.engine.optimizers import adamw
from megatron_ds.engine.optimizers.lion import Lion
from megatron_ds.engine.optimizers.param_groups import keep_settings_on_load
from tests.unit.engine.test_muon import SETTINGS, muon_of, soap_of, stepped

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


@pytest.mark.parametrize("name", ["adam", "lion", "muon", "normuon", "soap"])
def test_moments_in_bf16_are_loaded_bit_for_bit(name: str) -> None:
    def build(weight: nn.Parameter) -> torch.optim.Optimizer:
        groups = [{"params": [weight]}]
        if name == "adam":
            return adamw.AdamW(groups, exp_avg_dtype="bf16", **ADAM)
        if name == "lion":
            return Lion(groups, betas=(0.9, 0.99), exp_avg_dtype="bf16", **SETTINGS)
        beta = 0.9 if name == "normuon" else None
        types = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
        if name == "soap":
            return soap_of(weight, **types)
        return muon_of(weight, dtype=torch.float32, neuron_beta=beta, **types)

    optimizer = build(start())
    weight = stepped(optimizer)
    resumed = build(nn.Parameter(weight.clone()))
    keep_settings_on_load(resumed)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    types = {key: state.dtype for key, state in next(iter(resumed.state.values())).items()}
    assert types.pop("step", torch.float32) == torch.float32
    assert types.pop("preconditioner", torch.float32) == torch.float32
    assert types.pop("eigenbasis", torch.float32) == torch.float32
    assert types.pop("exp_avg_sq", BF16) == (torch.float32 if name == "adam" else BF16)
    assert set(types.values()) == {BF16}
    assert torch.equal(stepped(optimizer), stepped(resumed))
