"""Attention cores and norms on an accelerator equal their definitions on the CPU in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.func import functional_call

from megatron_ds.config import ModelConfig
from megatron_ds.inference.generation.sampling import choose, noise_key
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.model.attention.cores import SDPA
from megatron_ds.model.attention.masks import ragged_bias, score_bias
from megatron_ds.model.attention.packed import PerDocumentSDPA, document_lengths
from megatron_ds.model.declaration.parts import NormSpec
from megatron_ds.model.norm import apex_rms_norm, build_norm
from megatron_ds.parallel.mesh import Mesh

pytestmark = [
    pytest.mark.gpu(reason="kernels of the device are compared with the CPU"),
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16]),
]
B = 2
S = 96
HEADS = 4
GROUPS = 2
D = 32
SLOPES = [0.5, 0.25, 0.125, 0.0625]
EPSILON = 1e-2


def check(
    ours: Callable[..., Tensor],
    definition: Callable[..., Tensor],
    *shapes: tuple[int, ...],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Compares results and gradients of random inputs; the result has the shape of the first.

    Args:
        ours: Computes in the type on the device.
        definition: Computes in fp64 on the CPU.
        shapes: Of the inputs.
        dtype: Of the inputs.
        tolerance: Of a difference in bf16, relative to the norm; that of fp32 is 1e-5.
    """
    generator = torch.Generator().manual_seed(1)
    *inputs, grad = (
        torch.randn(shape, generator=generator).to(dtype) for shape in (*shapes, shapes[0])
    )
    device = torch.device(get_accelerator().current_device_name())
    results = []
    for compute, place in ((ours, (device, dtype)), (definition, ("cpu", torch.float64))):
        values = [value.clone().to(*place).requires_grad_() for value in inputs]
        out = compute(*values)
        gradients = torch.autograd.grad(out, values, grad.to(*place))
        results.append([each.detach().cpu().double() for each in (out, *gradients)])
    tolerance = 1e-5 if dtype == torch.float32 else tolerance
    for found, exact in zip(*results, strict=True):
        assert (found - exact).norm() < tolerance * exact.norm()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v."""
    k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v))
    return ((q @ k.transpose(-1, -2)) / D**0.5 + bias).softmax(-1) @ v


@pytest.mark.parametrize("name", ["causal", "alibi", "documents"])
def test_core_equals_plain_attention(name: str, dtype: torch.dtype) -> None:
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    bias = torch.zeros(S, S, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    core: SDPA | PerDocumentSDPA = SDPA(is_causal=True)
    if name == "alibi":
        alibi = score_bias(SLOPES, S, torch.device("cpu"))
        bias = bias + alibi.double()
        core = SDPA(alibi.to(get_accelerator().current_device_name(), dtype))
    elif name == "documents":
        documents = (torch.arange(S) % 40 == 39).cumsum(0).roll(1).expand(B, S).int().clone()
        documents[:, 0] = 0
        same = documents[:, None, :, None] == documents[:, None, None, :]
        bias = bias.masked_fill(~same, -torch.inf)
        core = PerDocumentSDPA(document_lengths(documents), None)
    check(
        lambda *qkv: core.attend(*qkv, 0.0),
        lambda *qkv: plain_attention(*qkv, bias),
        (B, HEADS, S, D),
        (B, GROUPS, S, D),
        (B, GROUPS, S, D),
        dtype=dtype,
        tolerance=2e-2,
    )


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}], ids=str)
def test_samples_are_those_of_the_host(options: dict[str, Any], dtype: torch.dtype) -> None:
    logits = torch.randn(64, 50_304, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = [noise_key(1, row, 0) for row in range(64)]
    on_device = logits.to(get_accelerator().current_device_name())
    drawn, expected = (
        choose(each, SamplingParams(**options), keys)[0].tolist() for each in (on_device, logits)
    )
    assert drawn == expected


def test_grouped_queries_of_texts_of_different_lengths_equal_plain_attention(
    dtype: torch.dtype,
) -> None:
    bias = ragged_bias(torch.tensor([[S // 3], [S - 1]]), S, torch.float64)
    core = SDPA(bias.to(get_accelerator().current_device_name(), dtype))
    check(
        lambda *qkv: core.attend(*qkv, 0.0),
        lambda *qkv: plain_attention(*qkv, bias),
        (2, HEADS, 1, D),
        (2, GROUPS, S, D),
        (2, GROUPS, S, D),
        dtype=dtype,
        tolerance=2e-2,
    )


@pytest.mark.parametrize("implementation", ["LayerNorm", "RMSNorm", "apex"])
def test_norm_equals_its_definition(implementation: str, dtype: torch.dtype) -> None:
    kind = "LayerNorm" if implementation == "LayerNorm" else "RMSNorm"
    config = ModelConfig(hidden_size=64, norm_epsilon=EPSILON, normalization=kind)
    norm = build_norm(NormSpec(config), "final_norm", Mesh.single().tp)
    if implementation == "apex":
        if (fused := apex_rms_norm()) is None:
            pytest.skip("NVIDIA's apex is not installed")
        norm = fused(64, eps=EPSILON)

    def definition(x: Tensor, weight: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
        return centered / (centered.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight

    norm.to(get_accelerator().current_device_name(), dtype)
    check(
        lambda x, weight: functional_call(norm, {"weight": weight}, x),
        definition,
        (5, 64),
        (64,),
        dtype=dtype,
        tolerance=1e-2,
    )
