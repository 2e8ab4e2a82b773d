"""The elementwise parts of a layer, and the trial of their compiled versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron_ds.model.kernels.compilation import use_elementwise
from megatron_ds.model.kernels.elementwise import (
    EAGER,
    Elementwise,
    activate,
    activate_eagerly,
    add_dropout,
    compile_elementwise,
)
from megatron_ds.parallel.mesh import Mesh
from tests.problems import codes
from tests.unit.model.dense import build_model, gradients
from tests.unit.model.test_packed_attention import CONFIG, CPU

SINGLE = Mesh.single().tp
FIELDS = dataclasses.fields(Elementwise)
ROPE: dict[str, Any] = {
    "position_embedding_type": "rope",
    "num_query_groups": 2,
    "rotary_percent": 0.5,
}


def trial(compiler: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "compile", compiler)
    config = dataclasses.replace(CONFIG, **ROPE, activation="swiglu", hidden_dropout=0.1)
    return compile_elementwise(config, 2, SINGLE, torch.bfloat16, CPU)


def test_functions_are_traced_without_graph_break(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = partial(torch.compile, backend="eager", fullgraph=True)
    functions, problem = trial(trace, monkeypatch)
    assert problem is None
    assert all(getattr(functions, one.name) is not getattr(EAGER, one.name) for one in FIELDS)


def test_a_layer_needs_no_graph_that_the_trial_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    functions, _ = trial(partial(torch.compile, backend=backend), monkeypatch)
    compiled = len(graphs)
    config = dataclasses.replace(CONFIG, **ROPE, activation="swiglu", hidden_dropout=0.1)
    model = build_model(config).bfloat16()
    use_elementwise(model, functions)
    tokens = torch.zeros((2, config.seq_length), dtype=torch.int64)
    model(tokens, tokens).loss_sum.backward()
    assert len(graphs) == compiled == len(FIELDS) + 1  # two for the loss


def test_a_compiler_that_fails_or_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any) -> Any:
        raise RuntimeError("no compiler\nmore")

    def wrong(function: Any) -> Any:
        return lambda *inputs: function(*inputs) * 1.1

    def keeps_all(function: Any) -> Any:
        return (lambda residual, x, *_: residual + x) if function is add_dropout else function

    for compiler, code in {
        broken: "compilation-failed",
        wrong: "compilation-inaccurate",
        keeps_all: "compilation-inaccurate",
    }.items():
        functions, problem = trial(compiler, monkeypatch)
        assert functions is EAGER
        assert codes([problem]) == [code]


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [("gelu", torch.float32), ("geglu", torch.bfloat16), ("openai-gelu", torch.float32)],
)
def test_a_graph_for_a_cpu_computes_the_same_gelu(activation: str, dtype: torch.dtype) -> None:
    values = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([1e4, -1e4, 0.0, -0.0])])
    x = torch.stack([values, values.flip(0)], dim=1).to(dtype)
    traced = torch.compile(activate, backend="aot_eager", fullgraph=True)

    def results(function: Callable[..., Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        y = function(leaf, activation, "tanh")
        y.sum().backward()
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    exact = results(activate, x.double())
    # Where the derivative is close to 1, the kernels subtract the tanh or the sigmoid from 1.
    bounds = (2, 20)
    for ours, expected, bound in zip(results(traced, x), exact, bounds, strict=True):
        assert ours.dtype == dtype
        error = (ours - expected).abs() / expected.abs().clamp(min=1.0)
        assert float(error.max()) <= bound * torch.finfo(dtype).eps


def test_every_layer_calls_the_functions() -> None:
    calls: list[str] = []

    def counted(name: str) -> Any:
        def call(*inputs: Any) -> Tensor:
            calls.append(name)
            result: Tensor = getattr(EAGER, name)(*inputs)
            return result

        return call

    config = dataclasses.replace(CONFIG, **ROPE, hidden_dropout=0.1)
    model = build_model(config)
    plain = build_model(config)
    names = ("rotate", "activate", "add_dropout")
    use_elementwise(model, Elementwise(*map(counted, names)))
    tokens = torch.arange(22).view(2, 11)
    for one in (model, plain):
        torch.manual_seed(1)
        one(tokens, tokens).loss_sum.backward()
    assert calls == ["rotate", "add_dropout", "activate", "add_dropout"] * config.num_layers
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(model)[name], gradient), name


@pytest.mark.parametrize("limits", [(), (None, 0.0), (0.5, 0.0), (None, 1.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eager_activation_has_the_same_numbers(
    limits: tuple[float | None, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 16, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(5, 3, 8, generator=generator, dtype=dtype)
    runs = []
    for function in (activate, activate_eagerly):
        y = function(x, "swiglu", "none", *limits)
        runs.append((y, *torch.autograd.grad(y, x, weight)))
    assert all(map(torch.equal, *runs))


def test_dropout_leaves_the_residual_stream() -> None:
    residual = torch.arange(1.0, 101.0)
    assert torch.equal(add_dropout(residual, torch.zeros(100), 0.5, SINGLE), residual)
    dropped = add_dropout(torch.zeros(1000), torch.ones(1000), 0.25, SINGLE)
    assert set(dropped.tolist()) == {0.0, torch.tensor(1.0 / 0.75).item()}


@pytest.mark.gpu(reason="the functions are compiled by default there only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_functions_are_accepted_on_an_accelerator(dtype: torch.dtype) -> None:
    if not get_accelerator().is_triton_supported():
        pytest.skip("this accelerator has no Triton")
    device = torch.device(get_accelerator().current_device_name())
    config = dataclasses.replace(CONFIG, **ROPE, activation="swiglu", hidden_dropout=0.1)
    functions, problem = compile_elementwise(config, 2, SINGLE, dtype, device)
    assert problem is None
    assert functions is not EAGER
