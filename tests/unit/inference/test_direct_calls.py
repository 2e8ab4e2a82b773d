"""Calls of a model's modules without the hooks of torch.nn.Module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_ds.inference.generation.direct_calls import call_directly
from tests.unit.inference.models import KINDS, model_of

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim (serving): calls of layers without torch's hooks give the same logits, bit for bit"""
    model = model_of(kind)
    names = [*model.state_dict()]
    with torch.no_grad():
        expected = model(TOKENS)
        call_directly(model)
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "_call_impl", None)
            patch.setattr(nn.Module, "__getattr__", None)
            logits = model(TOKENS)
    assert torch.equal(logits, expected)
    assert [*model.state_dict()] == names


def test_modules_with_hooks_or_a_call_of_their_own_keep_it() -> None:
    class Doubled(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.forward(x)

    calls = list[str]()
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: calls.append("hook"))
    replaced = nn.Linear(2, 2)
    replaced.forward = torch.zeros_like  # type: ignore[method-assign]
    compiled = nn.Identity()
    compiled._compiled_call_impl = torch.ones_like  # type: ignore[assignment]
    model = nn.Sequential(hooked, Doubled(2, 2), replaced, compiled)
    x = torch.randn(3, 2)
    expected = [layer(x) for layer in model]
    call_directly(model)
    assert all(map(torch.equal, [layer(x) for layer in model], expected))
    assert calls == ["hook"] * 2


def test_an_assigned_submodule_replaces_the_other_one() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    model.add_module("last", nn.Linear(3, 3))
    call_directly(model)
    model.last = nn.Linear(3, 5)
    model.last.bias = nn.Parameter(torch.ones(5))
    assert model(torch.zeros(1, 2)).shape == (1, 5)
    assert torch.equal(model.last(torch.zeros(1, 3)), torch.ones(1, 5))
    assert isinstance(model[0], nn.Linear)
