"""What an engine's model is built of: compiled parts, kernels, and the warnings about them."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_ds.config import Config, DataConfig, RecomputeConfig, RuntimeConfig
from megatron_ds.config.problems import Problem
from megatron_ds.engine import build
from megatron_ds.engine.build import selective_recompute_note
from megatron_ds.model.elementwise import EAGER, Elementwise
from megatron_ds.model.packed_attention import PackingOptions, VarlenKernel
from megatron_ds.parallel.mesh import Mesh
from tests.problems import codes
from tests.unit.model.dense import build_model, dense_varlen
from tests.unit.model.test_packed_attention import CONFIG

CPU, ELSEWHERE = torch.device("cpu"), torch.device("meta")
KERNEL = VarlenKernel(dense_varlen)
REASON = Problem("compilation-failed", reason="no compiler")


def config(dropout: float = 0.0, **groups: Any) -> Config:
    return Config(model=dataclasses.replace(CONFIG, attention_dropout=dropout), **groups)


@pytest.mark.parametrize(
    ("has_triton", "problem", "expected"),
    [(False, None, EAGER), (True, None, "compiled"), (True, REASON, EAGER)],
)
def test_elementwise_parts_are_compiled_where_there_is_triton(
    has_triton: bool, problem: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Elementwise()
    accelerator = MagicMock()
    accelerator.is_triton_supported.return_value = has_triton
    monkeypatch.setattr(build, "get_accelerator", lambda: accelerator)
    monkeypatch.setattr(build, "compile_elementwise", lambda *_: (compiled, problem))
    run = config()
    model = build_model(run.model)
    assert build._compile(model, run, Mesh.single(), CPU) is problem
    functions = model.layers["0"].elementwise
    assert (functions is compiled) == (expected == "compiled")
    assert ("nothing" in model.compiled) == (functions is EAGER)


def test_no_rank_compiles_elementwise_parts_where_another_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gather(problems: list[Any], own: Any) -> None:
        problems[:] = [own, REASON]

    monkeypatch.setattr(build, "get_accelerator", MagicMock())
    monkeypatch.setattr(build, "compile_elementwise", lambda *_: (Elementwise(), None))
    monkeypatch.setattr(build.dist, "all_gather_object", gather)
    run = config()
    model = build_model(run.model)
    mesh = dataclasses.replace(Mesh.single(), world_size=2)
    assert build._compile(model, run, mesh, CPU) is REASON
    assert model.layers["0"].elementwise is EAGER


def test_compiled_layers_need_no_compiled_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    run = config(runtime=RuntimeConfig(compile=True))
    model = build_model(run.model)
    assert build._compile(model, run, Mesh.single(), CPU) is None
    assert model.compiled == f"{run.model.num_layers} layers, loss by torch.compile"


def test_kernels_of_documents_are_selected_on_an_accelerator_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "select_document_kernel", lambda *_: (KERNEL, None))
    run = config(data=DataConfig(reset_attention_mask=True))
    for device, expected in ((CPU, None), (ELSEWHERE, KERNEL)):
        packing, warning = build._packing_options(run, Mesh.single(), device, eod=1)
        assert warning is None
        assert packing.kernel is expected


@pytest.mark.parametrize(
    ("dropout", "device", "packing", "is_noted"),
    [
        (0.0, CPU, None, True),
        (0.1, CPU, None, False),
        (0.1, ELSEWHERE, None, True),
        (0.0, ELSEWHERE, PackingOptions(0, False, True), False),
        (0.0, ELSEWHERE, PackingOptions(0, False, True, KERNEL), True),
        (0.0, CPU, PackingOptions(0, True, False), True),
    ],
)
def test_selective_recomputation_of_a_fused_kernel_is_noted(
    dropout: float, device: torch.device, packing: PackingOptions | None, is_noted: bool
) -> None:
    selective = RecomputeConfig(recompute_granularity="selective")
    note = selective_recompute_note(config(dropout, recompute=selective), packing, device)
    expected = ["selective-recompute-of-fused-attention"] if is_noted else []
    assert codes([note] if note is not None else []) == expected
    assert selective_recompute_note(config(dropout), packing, device) is None
