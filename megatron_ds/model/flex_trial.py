"""Start-up trial of torch's flex attention: selected only where it computes what it should.

Whether flex attention runs, and runs correctly, depends on the device, torch's version and the
shapes. Owns the comparison with `PerDocumentSDPA`.
"""

from __future__ import annotations

import warnings

import torch

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem
from megatron_ds.model.packed_attention import (
    DocumentFlexAttention,
    FlexAttention,
    PerDocumentSDPA,
    document_lengths,
)
from megatron_ds.model.position_embedding import alibi_bias

TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest accepted error, relative to the norm. fp32 may be computed in TF32."""


def select_flex_attention(
    config: ModelConfig,
    micro_batch: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[FlexAttention | None, Problem | None]:
    """Select flex attention if it trains this run's attention correctly on this device.

    It is tried, forward and backward, on tensors of the run's shapes and memory layout, so the
    first step needs no further compilation.

    Args:
        config: Architecture.
        micro_batch: Samples of a micro-batch.
        tp_size: Tensor-parallel size.
        dtype: Type of the activations.
        device: Device of the activations.

    Returns:
        The function, or the reason why it was not selected; the other one is None.
    """
    if config.attention_dropout > 0.0:
        return None, Problem("flex-attention-without-dropout")
    try:
        flex = _compiled_flex(device)
        error = _max_relative_error(flex, config, micro_batch, tp_size, dtype, device)
    except Exception as refusal:  # compilers and devices raise any type
        first_sentence = str(refusal).strip().partition("\n")[0].partition(". ")[0]
        reason = first_sentence or type(refusal).__name__
        return None, Problem("flex-attention-failed", reason=reason)
    if not error <= TOLERANCES[dtype]:  # also if the error is nan
        return None, Problem("flex-attention-inaccurate", error=error)
    return flex, None


def _compiled_flex(device: torch.device) -> FlexAttention:
    """Raises what flex attention raises on a device that it does not train on."""
    from torch.nn.attention.flex_attention import flex_attention

    tiny = torch.zeros((1, 1, 1, 16), device=device, requires_grad=True)
    with warnings.catch_warnings():
        # It warns when it is not compiled, but where it is unsupported compiling takes seconds.
        warnings.simplefilter("ignore")
        flex_attention(tiny, tiny, tiny)
    return torch.compile(flex_attention)


def _max_relative_error(
    flex: FlexAttention,
    config: ModelConfig,
    micro_batch: int,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """The larger of the relative errors of output and gradient against `PerDocumentSDPA`."""
    generator = torch.Generator().manual_seed(0)
    is_end = (
        torch.rand((micro_batch, config.seq_length), generator=generator) * config.seq_length < 6
    )
    doc_ids = is_end.cumsum(1, dtype=torch.int32).to(device)
    local_heads = config.num_attention_heads // tp_size, *[config.kv_heads // tp_size] * 2
    shape = config.seq_length, micro_batch, sum(local_heads) * config.head_dim
    qkv = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    grad = torch.randn((*shape[:2], local_heads[0], config.head_dim), generator=generator)
    grad = grad.permute(1, 2, 0, 3).to(device, dtype)
    lengths = document_lengths(doc_ids)
    slopes = bias = None
    if config.position_embedding_type == "alibi":
        slopes = torch.linspace(0.1, 0.5, local_heads[0], device=device)
        # As wide as the longest document: the bias of all scores can exceed the device's memory.
        longest = max(map(max, lengths))
        bias = alibi_bias(slopes.tolist(), longest, longest, device).to(dtype)
    results = []
    for core in (DocumentFlexAttention(flex, doc_ids, slopes), PerDocumentSDPA(lengths, bias)):
        parts = qkv.split([heads * config.head_dim for heads in local_heads], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, config.head_dim)) for part in parts)
        if config.position_embedding_type == "rope":  # rotation returns new, contiguous tensors
            q, k = q.contiguous(), k.contiguous()
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = core.attend(q, k, v, 0.0)
        (gradient,) = torch.autograd.grad(out, qkv, grad)
        results.append((out.detach().float(), gradient.float()))
    return max(
        float((one - other).norm() / other.norm()) for one, other in zip(*results, strict=True)
    )
