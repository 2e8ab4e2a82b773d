"""Trials of compiled parts and kernels, and the warnings about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch

from megatron_ds.config import (
    Config,
    DataConfig,
    DeepSpeedConfig,
    MoEConfig,
    PrecisionConfig,
    RecomputeConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from megatron_ds.config.problems import Problem
from megatron_ds.engine import trials
from megatron_ds.engine.trials import (
    ENGINE_CHECKS,
    Trial,
    attention_options,
    gathers_layers,
    run_checks,
)
from megatron_ds.model.attention import trial as attention_trial
from megatron_ds.model.attention.cores import name_of
from megatron_ds.model.attention.packed import FlexKernel, PackingOptions, VarlenKernel
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.kernels.elementwise import EAGER, Elementwise
from megatron_ds.parallel.fp8.rounding import Scaling
from megatron_ds.parallel.mesh import Mesh
from tests.problems import codes
from tests.proofs.cases import with_proofs
from tests.unit.model.dense import (
    build_model,
    computed_by,
    dense_flex,
    dense_varlen,
    documents_of,
    gradients,
)
from tests.unit.model.test_packed_attention import CONFIG

CPU = torch.device("cpu")
ELSEWHERE = torch.device("meta")
KERNEL = VarlenKernel(dense_varlen)
REASON = Problem("compilation-failed", reason="no compiler")


def config(dropout: float = 0.0, **groups: Any) -> Config:
    return Config(model=dataclasses.replace(CONFIG, attention_dropout=dropout), **groups)


def compiled_by(model: GPTModel, run: Config, mesh: Mesh | None = None) -> list[Problem]:
    """Compile a model's layers as for the engine, and return the problems."""
    trial = Trial(run, model, mesh or Mesh.single(), CPU)
    return list(run_checks(ENGINE_CHECKS, trial))


TILED = RecomputeConfig(tiled_mlp=True)
"""Its layers are eager."""


@pytest.mark.parametrize(
    ("has_triton", "problem", "expected"),
    [(False, None, EAGER), (True, None, "compiled"), (True, REASON, EAGER)],
)
def test_elementwise_parts_are_compiled_where_there_is_triton_and_layers_are_not(
    has_triton: bool, problem: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Elementwise()
    accelerator = MagicMock()
    accelerator.is_triton_supported.return_value = has_triton
    monkeypatch.setattr(trials, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(trials, "compile_elementwise", lambda *_: (compiled, problem))
    run = config(recompute=TILED)
    model = build_model(run.model)
    assert compiled_by(model, run) == ([] if problem is None else [problem])
    functions = model.layers["0"].elementwise
    assert (functions is compiled) == (expected == "compiled")
    assert ("nothing" in model.compiled) == (functions is EAGER)
    assert ("layers eager (MLP in tiles)" in model.compiled) == (functions is compiled)
    assert not model.has_compiled_layers


def test_no_rank_compiles_elementwise_parts_where_another_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(problems: list[Any], own: Any) -> None:
        problems[:] = [own, REASON]

    monkeypatch.setattr(trials, "get_accelerator", MagicMock())
    monkeypatch.setattr(trials, "compile_elementwise", lambda *_: (Elementwise(), None))
    monkeypatch.setattr(trials.dist, "all_gather_object", gather)
    run = config(recompute=TILED)
    model = build_model(run.model)
    mesh = dataclasses.replace(Mesh.single(), world_size=2)
    assert compiled_by(model, run, mesh) == [REASON]
    assert model.layers["0"].elementwise is EAGER


def test_compiled_layers_need_no_compiled_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run = config(runtime=RuntimeConfig(compile=True))
    model = build_model(run.model)
    assert compiled_by(model, run) == []
    assert model.compiled == f"{run.model.num_layers} layers, loss by torch.compile"


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that torch.compile makes, on a device with Triton."""
    made: list[Any] = []

    def backend(graph: Any, _: Any, **options: Any) -> Any:
        made.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(trials, "get_accelerator", MagicMock())
    monkeypatch.setattr(trials, "compile_elementwise", lambda *_: (Elementwise(), None))
    torch._dynamo.reset()
    yield made
    torch._dynamo.reset()


def step(model: GPTModel, length: int = CONFIG.seq_length) -> None:
    tokens_BS = torch.arange(2 * length).view(2, length) % 8
    model(tokens_BS, tokens_BS, documents=documents_of(model, tokens_BS, 7)).loss_sum.backward()


@pytest.mark.parametrize(
    ("documents", "recompute"),
    with_proofs(
        [(False, None), (True, None), (False, "full"), (False, "selective")], [(False, "full")]
    ),
)
def test_layers_are_compiled_by_default_on_an_accelerator(
    documents: bool, recompute: str | None, graphs: list[Any]
) -> None:
    """All layers by the graphs of the trial, so that the first step compiles nothing."""
    found = []
    for layers in (1, 2):
        packing = PackingOptions(True, True) if documents else None
        run = config(schedule=ScheduleConfig(micro_batch_size=2))
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, num_layers=layers))
        model = build_model(run.model, recompute, packing=packing)
        torch._dynamo.reset()
        graphs.clear()
        assert compiled_by(model, run) == []
        assert model.has_compiled_layers
        parts = " except attention" if documents or recompute == "selective" else ""
        assert model.compiled == f"{layers} layers{parts}, loss by torch.compile"
        tried = len(graphs)
        step(model)
        assert len(graphs) == tried
        found.append(tried)
    assert found[0] == found[1]


def test_layers_are_compiled_around_experts_by_default(graphs: list[Any]) -> None:
    """The trial leaves the experts out: their parts are compiled in the first step."""
    moe = MoEConfig(num_experts=(4,), moe_router_topk=2)
    run = config(moe=moe, schedule=ScheduleConfig(micro_batch_size=2))
    model = build_model(run.model, moe=moe)
    experts = [block.mlp for block in model.blocks()]
    assert compiled_by(model, run) == []
    layers = run.model.num_layers
    assert model.compiled == f"{layers} layers except attention and experts, loss by torch.compile"
    assert [block.mlp for block in model.blocks()] == experts
    tried = len(graphs)
    step(model)
    # The choice of the experts, the order of the rows, the rows in it, their activation, and the
    # weighted sum: the layers share each graph.
    assert len(graphs) == tried + 5


@pytest.mark.parametrize(
    ("groups", "zero", "is_expected"),
    [
        ({}, {}, True),
        ({}, {"stage": 2}, False),
        ({}, {"memory_efficient_linear": False}, False),
        ({}, {"offload_param": {"device": "cpu"}}, True),
        ({}, {"offload_param": {"device": "nvme"}}, False),
        ({"runtime": RuntimeConfig(no_compile=True)}, {}, False),
        ({"recompute": TILED}, {}, False),
    ],
)
@pytest.mark.parametrize("has_triton", [False, True])
def test_zero3_gathers_layers_that_may_be_compiled(
    groups: dict[str, Any],
    zero: dict[str, Any],
    is_expected: bool,
    has_triton: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = MagicMock()
    accelerator.is_triton_supported.return_value = has_triton
    monkeypatch.setattr(trials, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(trials, "compiles_efficient_linear", lambda: True)
    ds_config = {"zero_optimization": {"stage": 3, **zero}}
    assert gathers_layers(config(**groups), ds_config) == (is_expected and has_triton)
    if not groups:
        compiled = config(runtime=RuntimeConfig(compile=True))
        assert gathers_layers(compiled, ds_config) == is_expected
        monkeypatch.setattr(trials, "compiles_efficient_linear", lambda: False)
        assert not gathers_layers(compiled, ds_config)


def test_layers_are_tried_without_their_weights(graphs: list[Any]) -> None:
    """They are arbitrary, and may be nan, until a checkpoint is loaded."""
    run = config(0.1, schedule=ScheduleConfig(micro_batch_size=2))
    model = build_model(run.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert compiled_by(model, run) == []
    assert model.has_compiled_layers
    assert all(parameter.isnan().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ({"deepspeed": DeepSpeedConfig(zero_stage=3)}, "ZeRO stage 3"),
        ({"recompute": TILED}, "MLP in tiles"),
    ],
)
def test_what_is_eager_by_default_is_said(
    groups: dict[str, Any], reason: str, graphs: list[Any]
) -> None:
    run = config(**groups)
    model = build_model(run.model)
    assert compiled_by(model, run) == []
    assert f"layers eager ({reason})" in model.compiled
    assert graphs == []


def test_nothing_is_compiled_on_request(graphs: list[Any]) -> None:
    run = config(runtime=RuntimeConfig(no_compile=True))
    model = build_model(run.model)
    assert compiled_by(model, run) == []
    step(model)
    assert (model.compiled, graphs) == ("nothing (eager)", [])


@pytest.mark.parametrize("failure", ["broken", "wrong", "other rank"])
def test_layers_whose_trial_fails_are_eager(
    failure: str, graphs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def backend(graph: Any, _: Any, **options: Any) -> Any:
        if failure == "broken":
            raise RuntimeError("no compiler")
        scale = 1.1 if failure == "wrong" else 1.0
        return lambda *inputs: [scale * each for each in graph.forward(*inputs)]

    def gather(problems: list[Any], own: Any) -> None:
        problems[:] = [own, others.pop()]

    others = [None, REASON if failure == "other rank" else None]
    compiler = partial(torch.compile.func, backend=backend)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch, "compile", compiler)
    monkeypatch.setattr(trials.dist, "all_gather_object", gather)
    run = config(schedule=ScheduleConfig(micro_batch_size=2))
    model = build_model(run.model)
    plain = build_model(run.model)
    mesh = dataclasses.replace(Mesh.single(), world_size=2)
    problems = compiled_by(model, run, mesh)
    expected = "compilation-failed" if failure == "other rank" else "layers-not-compiled"
    assert codes(problems) == [expected]
    assert "layers eager (their trial failed)" in model.compiled
    assert not model.has_compiled_layers
    for each in (model, plain):
        step(each)
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(model)[name], gradient), name


def test_alibi_is_computed_in_a_kernel_on_an_accelerator_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_trial, "_max_relative_error", lambda *_: 0.0)
    monkeypatch.setattr(attention_trial, "_compiled_flex", lambda _: dense_flex)
    alibi = dataclasses.replace(CONFIG, position_embedding_type="alibi")
    flex = computed_by(FlexKernel(dense_flex), alibi).kernels
    for model, device, choice, expected in (
        (alibi, CPU, "auto", {}),
        (alibi, ELSEWHERE, "auto", flex),
        (alibi, ELSEWHERE, "efficient", {}),
        (CONFIG, ELSEWHERE, "auto", {}),
    ):
        run = Config(model=model, runtime=RuntimeConfig(attention_backend=choice))
        options, warnings = attention_options(run, Mesh.single(), device)
        assert (options.kernels, warnings) == (expected, [])


def test_kernels_of_attention_have_an_order() -> None:
    def order(**groups: Any) -> tuple[list[str], list[str]]:
        options, _ = attention_options(config(**groups), Mesh.single(), ELSEWHERE)
        return [*map(name_of, options.samples)], [*map(name_of, options.documents)]

    varying = ["flash", "efficient", "math", "overrideable"]
    lengths_vary = ScheduleConfig(curriculum_seqlen=(8, 16, 10))
    assert order(schedule=lengths_vary) == (varying, varying)
    assert order() == (["cudnn", *varying], varying)
    assert order(runtime=RuntimeConfig(attention_backend="cudnn")) == (["cudnn"], ["cudnn"])


def test_kernels_of_documents_are_selected_on_an_accelerator_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "select_kernel", lambda *_, has_documents: (KERNEL, None))
    run = config(data=DataConfig(reset_attention_mask=True))
    for device, expected in ((CPU, []), (ELSEWHERE, [KERNEL])):
        attention, warnings = attention_options(run, Mesh.single(), device)
        assert warnings == []
        assert [*attention.kernels.values()] == expected


@pytest.mark.parametrize(
    ("dropout", "device", "has_documents", "kernel", "is_noted"),
    [
        (0.0, CPU, False, None, True),
        (0.1, CPU, False, None, False),
        (0.1, ELSEWHERE, False, None, True),
        (0.0, ELSEWHERE, True, None, False),
        (0.0, ELSEWHERE, True, KERNEL, True),
    ],
)
def test_selective_recomputation_of_a_fused_kernel_is_noted(
    dropout: float, device: torch.device, has_documents: bool, kernel: Any, is_noted: bool
) -> None:
    selective = RecomputeConfig(recompute_granularity="selective")
    data = DataConfig(reset_attention_mask=has_documents)
    model = MagicMock(attention=computed_by(kernel, CONFIG))
    run = config(dropout, recompute=selective, data=data)
    noted = trials.selective_recompute(Trial(run, model, Mesh.single(), device))
    expected = ["selective-recompute-of-fused-attention"] if is_noted else []
    assert codes(noted) == expected
    plain = Trial(config(dropout), model, Mesh.single(), device)
    assert codes(trials.selective_recompute(plain)) == []


@pytest.mark.parametrize(
    ("recipe", "scalings"),
    [
        ("tensorwise", [(False, None, None)]),
        ("rowwise", [(True, None, None)]),
        ("blockwise", [(True, (1, 128), (128, 128)), (True, (1, 128), (1, 128))]),
    ],
)
@pytest.mark.parametrize("bf16", [True, False])
def test_products_in_fp8_without_a_kernel_are_noted(
    recipe: str, scalings: list[Scaling], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = PrecisionConfig(bf16=bf16, fp8_format="e4m3", fp8_recipe=recipe)
    asked: list[tuple[torch.device, Scaling]] = []

    def has_kernel(device: torch.device, scaling: Scaling) -> bool:
        asked.append((device, scaling))
        return device == ELSEWHERE and scaling == scalings[0]

    monkeypatch.setattr(trials, "has_kernel", has_kernel)
    model = MagicMock()
    for device in (CPU, ELSEWHERE):
        trial = Trial(config(precision=precision), model, Mesh.single(), device)
        is_usable = bf16 and device == ELSEWHERE and len(scalings) == 1
        expected = [] if is_usable else ["fp8-without-kernel"]
        assert codes(trials.fp8_products(trial)) == expected
    assert codes(trials.fp8_products(Trial(config(), model, Mesh.single(), CPU))) == []
    tried = [(CPU, scalings[0]), *((ELSEWHERE, scaling) for scaling in scalings)]
    assert asked == tried * bf16


@pytest.mark.parametrize(("triton", "no_compile"), [(True, False), (True, True), (False, False)])
def test_casts_to_fp8_are_compiled_where_there_is_a_kernel(
    triton: bool, no_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = PrecisionConfig(bf16=True, fp8_format="e4m3", fp8_recipe="rowwise")
    runtime = RuntimeConfig(no_compile=no_compile)
    accelerator = MagicMock()
    accelerator.is_triton_supported.return_value = triton
    monkeypatch.setattr(trials, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(trials, "has_kernel", lambda *_: True)
    monkeypatch.setattr(trials, "recipe_of", lambda model: "recipe" if model == "model" else None)
    tried: list[tuple[Any, ...]] = []
    mesh = Mesh.single()

    def compile_rounding(*arguments: Any, **options: bool) -> Problem:
        tried.append((*arguments, options))
        return REASON

    monkeypatch.setattr(trials, "compile_rounding", compile_rounding)
    for model in ("model", "stage without layers in fp8"):
        run = config(precision=precision, runtime=runtime)
        trial = Trial(run, cast(Any, model), mesh, ELSEWHERE)
        is_tried = triton and not no_compile and model == "model"
        assert codes(trials.fp8_products(trial)) == codes([REASON]) * is_tried
    options = {"lengths_vary": False, "keeps_weights": True, "has_experts": False}
    assert tried == [("recipe", ELSEWHERE, mesh, options)] * (triton and not no_compile)


def test_problems_are_reported_in_the_order_of_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every check runs, whatever the others find."""
    missing = Problem("layers-not-compiled", reason="slow")
    monkeypatch.setattr(trials, "replace_slow_products", lambda *_: REASON)
    monkeypatch.setattr(trials, "try_grouped_matmuls", lambda *_: missing)
    selective = config(recompute=RecomputeConfig(recompute_granularity="selective"))
    model = MagicMock(attention=computed_by(None, CONFIG))
    found = run_checks(trials.MODEL_CHECKS, Trial(selective, model, Mesh.single(), CPU))
    assert codes(found) == [
        "compilation-failed",
        "layers-not-compiled",
        "selective-recompute-of-fused-attention",
    ]
