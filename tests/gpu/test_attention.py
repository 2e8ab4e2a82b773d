"""Attention cores on an accelerator equal plain attention on the CPU in fp64."""

from __future__ import annotations

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron_ds.model.attention_cores import SDPA
from megatron_ds.model.packed_attention import PerDocumentSDPA, document_lengths
from megatron_ds.model.position_embedding import alibi_bias

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative to the norm of the result."""
B, S, HEADS, GROUPS, D = 2, 96, 4, 2, 32
SLOPES = [0.5, 0.25, 0.125, 0.0625]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias) v."""
    k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v))
    return ((q @ k.transpose(-1, -2)) / D**0.5 + bias).softmax(-1) @ v


def cases() -> dict[str, tuple[Tensor, Tensor | None, Tensor]]:
    """Name -> bias of plain attention in fp64, alibi's bias, document ids [B, S]."""
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    causal = torch.zeros(S, S, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    alibi = alibi_bias(SLOPES, S, S, torch.device("cpu"))
    documents = (torch.arange(S) % 40 == 39).cumsum(0).roll(1).expand(B, S).int()
    documents = documents.clone()
    documents[:, 0] = 0
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return {
        "causal": (causal, None, torch.zeros_like(documents)),
        "alibi": (causal + alibi.double(), alibi, torch.zeros_like(documents)),
        "documents": (causal.masked_fill(~same, -torch.inf), None, documents),
    }


@pytest.mark.gpu(reason="kernels of the device are compared with the CPU")
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", ["causal", "alibi", "documents"])
def test_core_equals_plain_attention(name: str, dtype: torch.dtype) -> None:
    device = torch.device(get_accelerator().current_device_name())
    bias, alibi, documents = cases()[name]
    generator = torch.Generator().manual_seed(1)
    shapes = ((B, HEADS, S, D), (B, GROUPS, S, D), (B, GROUPS, S, D))
    exact = [torch.randn(s, generator=generator).to(dtype).double() for s in shapes]
    grad = torch.randn(shapes[0], generator=generator).to(dtype).double()
    if name == "documents":
        core = PerDocumentSDPA(document_lengths(documents), None)
    elif alibi is not None:
        core = SDPA(alibi.to(device, dtype))  # type: ignore[assignment]
    else:
        core = SDPA(is_causal=True)  # type: ignore[assignment]
    results = []
    for values, attend in (
        (exact, lambda *qkv: plain(*qkv, bias)),
        ([part.to(device, dtype) for part in exact], lambda *qkv: core.attend(*qkv, 0.0)),
    ):
        qkv = [part.detach().requires_grad_() for part in values]
        out = attend(*qkv)
        gradients = torch.autograd.grad(out, qkv, grad.to(out.device, out.dtype))
        results.append([out.detach(), *gradients])
    for ours, theirs in zip(results[1], results[0], strict=True):
        error = (ours.cpu().double() - theirs).norm() / theirs.norm()
        assert error < TOLERANCES[dtype]
