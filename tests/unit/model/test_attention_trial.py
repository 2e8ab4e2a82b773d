"""Selection of the kernel of intra-document attention, and its kernels on an accelerator."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention import trial as attention_trial
from megatron_ds.model.attention.masks import BLOCK, MaskTables
from megatron_ds.model.attention.packed import (
    FlexKernel,
    Keys,
    PackingOptions,
    PerDocumentSDPA,
    VarlenKernel,
    document_lengths,
)
from megatron_ds.model.attention.rule import AttentionRule, attention_rules
from megatron_ds.model.attention.trial import candidates, select_kernel
from tests.problems import codes
from tests.unit.model.dense import dense_flex, dense_varlen
from tests.unit.model.test_packed_attention import CONFIG, CPU, EOD, POSITIONS

TORCH_VARLEN = attention_trial._torch_varlen


def broken(*_: Any, **__: Any) -> Tensor:
    raise RuntimeError("No triton here. Please install it.\nAt length.")


def returns_nan(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return q * torch.nan


def ignores_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    return dense_varlen(q, k, v, starts[[0, -1]], longest)


def select_for(config: ModelConfig, *shape: Any, has_documents: bool = True) -> Any:
    """`select_kernel` for the rule of the first layer."""
    return select_kernel(attention_rules(config)[0], config, *shape, has_documents=has_documents)


select_alibi_kernel = partial(select_for, has_documents=False)


def select(
    monkeypatch: pytest.MonkeyPatch,
    varlen: Any = broken,
    flex: Any = broken,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> tuple[Any, list[str]]:
    """The name of the selected kernel, and the code of the reason why none was."""
    monkeypatch.setattr(attention_trial, "_torch_varlen", lambda rule: varlen)
    monkeypatch.setattr(attention_trial, "_compiled_flex", lambda device: flex)
    config = dataclasses.replace(CONFIG, **options)
    kernel, reason = select_for(config, 2, 1, dtype, CPU)
    return kernel and kernel.name, codes([reason] if reason is not None else [])


def test_candidates_are_those_that_compute_the_attention() -> None:
    rope, alibi = (
        attention_rules(dataclasses.replace(CONFIG, position_embedding_type=kind))[0]
        for kind in ("rope", "alibi")
    )
    half, single = (Keys(8, dtype, CPU, True) for dtype in (torch.bfloat16, torch.float32))
    samples = dataclasses.replace(half, has_documents=False)
    for rule, keys, shards, choice, expected in (
        (rope, half, 1, "auto", (VarlenKernel, FlexKernel)),
        (rope, dataclasses.replace(half, dtype=torch.float16), 1, "flash", (VarlenKernel,)),
        (rope, single, 1, "auto", (FlexKernel,)),
        (alibi, half, 1, "auto", (FlexKernel,)),
        (rope, half, 2, "auto", (FlexKernel,)),
        (rope, half, 1, "math", ()),
        (alibi, half, 1, "flash", ()),
        (rope, samples, 1, "auto", ()),
        (alibi, samples, 1, "auto", (FlexKernel,)),
    ):
        assert candidates(rule, keys, shards, choice) == expected


@pytest.mark.parametrize("position", POSITIONS)
def test_the_first_kernel_that_agrees_is_selected(
    position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"position_embedding_type": position, "num_query_groups": 2}
    if position == "alibi":
        assert select(monkeypatch, flex=dense_flex, dtype=torch.float32, **options)[1] == []
        return
    found, _ = select(monkeypatch, dense_varlen, dense_flex, **options)
    assert found == "torch's varlen_attn"
    for wrong in (broken, returns_nan, ignores_documents):
        found, _ = select(monkeypatch, wrong, dense_flex, **options)
        assert found == "torch's flex_attention"


def test_a_run_without_a_kernel_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select(monkeypatch, broken, returns_nan) == (None, ["document-attention-slow"])
    assert select(monkeypatch, dense_varlen, dense_flex, attention_dropout=0.1) == (
        None,
        ["document-attention-with-dropout"],
    )


def test_alibi_has_a_kernel_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens compared are the first ones of a sample."""

    def without_bias(*qkv: Tensor, score_mod: Any, **options: Any) -> Tensor:
        return dense_flex(*qkv, score_mod=None, **options)

    def sees_all(*qkv: Tensor, block_mask: Any, **options: Any) -> Tensor:
        block_mask.mask_mod = lambda row, head, query, key: key >= 0
        return dense_flex(*qkv, block_mask=block_mask, **options)

    shape = {"position_embedding_type": "alibi", "num_query_groups": 2, "seq_length": BLOCK + 3}
    config = dataclasses.replace(CONFIG, **shape)
    for compared in (BLOCK + 3, 40):
        monkeypatch.setattr(attention_trial, "COMPARED", compared)
        for flex, expected in (
            (dense_flex, []),
            (broken, ["alibi-slow"]),
            (without_bias, ["alibi-slow"]),
            (sees_all, ["alibi-slow"]),
        ):
            monkeypatch.setattr(attention_trial, "_compiled_flex", lambda device, flex=flex: flex)
            kernel, reason = select_alibi_kernel(config, 2, 1, torch.float32, CPU)
            assert codes([] if reason is None else [reason]) == expected
            assert (kernel is None) == bool(expected)
    with_dropout = dataclasses.replace(config, attention_dropout=0.1)
    kernel, reason = select_alibi_kernel(with_dropout, 2, 1, torch.float32, CPU)
    assert kernel is None
    assert codes([reason]) == ["alibi-with-dropout"]


def test_a_window_has_a_kernel_that_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial is one of the layer's rule: causal attention without the window is rejected."""

    def without_window(*qkv: Tensor, block_mask: Any, **options: Any) -> Tensor:
        block_mask.mask_mod = lambda row, head, query, key: key <= query
        return dense_flex(*qkv, block_mask=block_mask, **options)

    shape = {"window_size": "3,0", "seq_length": 64}
    config = dataclasses.replace(CONFIG, **shape)
    for flex, expected in ((dense_flex, []), (without_window, ["window-attention-slow"])):
        monkeypatch.setattr(attention_trial, "_compiled_flex", lambda _, flex=flex: flex)
        _, reason = select_for(config, 2, 1, torch.float32, CPU, has_documents=False)
        assert codes([] if reason is None else [reason]) == expected
    dropping = dataclasses.replace(config, attention_dropout=0.1)
    _, reason = select_for(dropping, 2, 1, torch.float32, CPU, has_documents=False)
    assert codes([reason]) == ["window-attention-with-dropout"]
    windowed = partial(dense_varlen, window=4)
    found, _ = select(monkeypatch, windowed, dense_flex, **shape)
    assert found == "torch's varlen_attn"
    found, _ = select(monkeypatch, dense_varlen, dense_flex, **shape)
    assert found == "torch's flex_attention"


@pytest.mark.parametrize("has_documents", [False, True])
def test_changed_scores_have_a_kernel_that_agrees(
    has_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_cap(*qkv: Tensor, score_mod: Any, **options: Any) -> Any:
        return dense_flex(*qkv, score_mod=None, **options)

    def without_sinks(*qkv: Tensor, return_lse: bool = False, **options: Any) -> Any:
        attended = dense_flex(*qkv, **options)
        return (attended, torch.full(attended.shape[:3], 20.0)) if return_lse else attended

    rule = AttentionRule(softcap=0.5, sinks=True)
    shape = (2, 1, torch.float32, CPU)
    config = dataclasses.replace(CONFIG, seq_length=64)
    codes_of: list[list[str]] = []
    for flex in (dense_flex, without_cap, without_sinks):
        monkeypatch.setattr(attention_trial, "_compiled_flex", lambda _, flex=flex: flex)
        kernel, reason = select_kernel(rule, config, *shape, has_documents=has_documents)
        assert (kernel is None) == (flex is not dense_flex)
        codes_of.append([] if reason is None else codes([reason]))
    dropping = dataclasses.replace(config, attention_dropout=0.1)
    _, reason = select_kernel(rule, dropping, *shape, has_documents=has_documents)
    assert reason is not None
    slow = ["explicit-scores-slow"]
    assert [*codes_of, codes([reason])] == [[], slow, slow, ["explicit-scores-with-dropout"]]


def test_kernels_of_torch_do_not_train_on_a_cpu() -> None:
    kernel, reason = select_for(CONFIG, 2, 1, torch.bfloat16, CPU)
    assert kernel is None
    assert codes([reason]) == ["document-attention-slow"]


@pytest.mark.parametrize(
    ("window", "scale", "parameters", "expected"),
    [
        (None, None, "is_causal=False", {"is_causal": True}),
        (None, None, "*, window_size=(-1, -1)", {"window_size": (-1, 0)}),
        (4, None, "*, is_causal=False, window_size=(-1, -1)", {"window_size": (3, 0)}),
        (4, 0.5, "*, window_size=None, scale=None", {"window_size": (3, 0), "scale": 0.5}),
        (
            None,
            None,
            "*, window_size=(-1, -1), enable_gqa=False",
            {"window_size": (-1, 0), "enable_gqa": True},
        ),
    ],
)
def test_varlen_attention_is_causal_in_every_version_of_torch(
    window: int | None,
    scale: float | None,
    parameters: str,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.nn.attention import varlen

    names: dict[str, Any] = {"seen": {}}
    arguments = "query, key, value, cu_seq_q, cu_seq_k, max_q, max_k"
    exec(f"def attend({arguments}, {parameters}): seen.update(locals())", names)
    monkeypatch.setattr(varlen, "varlen_attn", names["attend"])
    q = torch.zeros(3, 4, 8)
    k = torch.zeros(3, 2, 8)
    starts = torch.tensor([0, 3])
    TORCH_VARLEN(AttentionRule(window=window, scale=scale))(q, k, k, starts, 3)
    seen = names["seen"]
    assert (seen.pop("cu_seq_q") is starts, seen.pop("cu_seq_k") is starts) == (True, True)
    assert (seen.pop("max_q"), seen.pop("max_k")) == (3, 3)
    assert {name: seen[name] for name in expected} == expected


@pytest.mark.gpu(reason="torch's kernels of intra-document attention train only there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", POSITIONS)
def test_a_kernel_is_selected_on_an_accelerator(position: str, dtype: torch.dtype) -> None:
    device = torch.device(get_accelerator().current_device_name())
    shape = {"hidden_size": 256, "num_query_groups": 2, "seq_length": 5 * BLOCK + 3}
    config = dataclasses.replace(CONFIG, **shape, position_embedding_type=position)
    kernel, reason = select_for(config, 3, 1, dtype, device)
    assert kernel is not None, reason


@pytest.mark.gpu(reason="flex attention trains only there")
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changed_scores_have_a_kernel_on_an_accelerator(
    dtype: torch.dtype, has_documents: bool
) -> None:
    device = torch.device(get_accelerator().current_device_name())
    shape = {"hidden_size": 256, "num_query_groups": 2, "seq_length": 5 * BLOCK + 3}
    config = dataclasses.replace(CONFIG, **shape)
    rule = AttentionRule(window=200, scale=0.2, softcap=3.0, sinks=True)
    kernel, reason = select_kernel(rule, config, 3, 1, dtype, device, has_documents=has_documents)
    assert kernel is not None, reason


@pytest.mark.gpu(reason="flex attention trains only there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alibi_has_a_kernel_on_an_accelerator(dtype: torch.dtype) -> None:
    device = torch.device(get_accelerator().current_device_name())
    shape = {"hidden_size": 256, "num_query_groups": 2, "seq_length": 5 * BLOCK + 3}
    config = dataclasses.replace(CONFIG, **shape, position_embedding_type="alibi")
    kernel, reason = select_alibi_kernel(config, 3, 1, dtype, device)
    assert kernel is not None, reason


@pytest.mark.gpu(reason="torch's kernels of intra-document attention train only there")
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", [VarlenKernel, FlexKernel])
def test_kernel_equals_attention_on_the_cpu(kind: Any, groups: int) -> None:
    device = torch.device(get_accelerator().current_device_name())
    length = 2 * BLOCK + 9
    generator = torch.Generator().manual_seed(1)
    tokens = torch.where(torch.rand(2, length, generator=generator) < 0.02, EOD, EOD + 1)
    qkv = [
        torch.randn(2, heads, length, 64, generator=generator).bfloat16()
        for heads in (4, groups, groups)
    ]
    grad = torch.randn(2, 4, length, 64, generator=generator).bfloat16()
    rule = attention_rules(CONFIG)[0]
    try:
        kernel = attention_trial._build(kind, rule, device)
    except ImportError:
        pytest.skip(f"this version of torch has no {kind.name}")
    packing = PackingOptions(False, True)
    packed = packing.find_documents(tokens.to(device), max_documents=2 + int((tokens == EOD).sum()))
    reference = PerDocumentSDPA(document_lengths(packed.doc_ids_BS))
    results = []
    keys = Keys(length, torch.bfloat16, device, True, packed)
    for core, place, dtype in (
        (kernel.core(rule, keys, MaskTables([])), device, torch.bfloat16),
        (reference, CPU, torch.float32),
    ):
        inputs = [part.to(place, dtype).requires_grad_() for part in qkv]
        out = core.attend(*inputs, 0.0)
        gradients = torch.autograd.grad(out, inputs, grad.to(place, dtype))
        results.append([part.detach().cpu().float() for part in (out, *gradients)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() < 2e-2 * expected.norm()
