"""The trial at start-up of kernels for documents, ALiBi and windows, on an accelerator.

Whether a kernel runs, and runs correctly, depends on the device, torch's version and the shapes, so
it is selected only if it equals an eager backend in a trial of the layer's rule. On a CPU none
of them trains.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import Problem
from megatron_ds.model.attention.backends import EagerBackend
from megatron_ds.model.attention.masks import MaskTables
from megatron_ds.model.attention.packed import (
    AttentionBackend,
    FlexAttention,
    FlexKernel,
    Keys,
    PackingOptions,
    PerDocumentBackend,
    VarlenAttention,
    VarlenKernel,
)
from megatron_ds.model.attention.rule import AttentionRule

Kind = type[VarlenKernel] | type[FlexKernel]
TOLERANCES = {torch.float32: 5e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest accepted error, relative to the norm. fp32 may be computed in TF32."""
EOD = 0
"""End of a document in the trial."""
COMPARED = 1024
"""Tokens of a sample without documents that are compared: all of ALiBi's bias may exceed the
device's memory."""


def select_kernel(
    rule: AttentionRule,
    config: ModelConfig,
    micro_batch: int,
    shards: int,
    dtype: torch.dtype,
    device: torch.device,
    choice: str = "auto",
    *,
    has_documents: bool = True,
) -> tuple[AttentionBackend | None, Problem | None]:
    """Select the first kernel that trains this run's attention correctly on this device.

    It is tried, forward and backward, on tensors of the run's shapes and memory layout, so the
    first step needs no further compilation.

    Args:
        rule: Attention rule of the layer.
        config: Architecture.
        micro_batch: Samples of a micro-batch.
        shards: Ranks that share the heads: tensor- and sequence-parallel ones.
        dtype: Type of the activations.
        device: Device of the activations.
        choice: The value of --attention-backend.
        has_documents: Whether attention ends with a document.

    Returns:
        The kernel, or the reason why none was selected; the other one is None. None of both if
        torch's scaled_dot_product_attention needs no other kernel, or `choice` has none.
    """
    keys = Keys(config.seq_length, dtype, device, has_documents)
    kinds = candidates(rule, keys, shards, choice)
    if not kinds:
        return None, None
    subject = 3 if rule.needs_scores else 0 if has_documents else 1 if rule.alibi else 2
    if config.attention_dropout > 0.0:
        dropped = (
            Problem("document-attention-with-dropout"),
            Problem("alibi-with-dropout"),
            Problem("window-attention-with-dropout"),
            Problem("explicit-scores-with-dropout"),
        )
        return None, dropped[subject]
    trial = rule, keys, config, micro_batch, shards
    reasons = []
    for cls in kinds:
        kernel, reason = _try(cls, *trial)
        if kernel is not None:
            return kernel, None
        reasons.append(f"{cls.name}: {reason}")
    text = "; ".join(reasons)
    slow = (
        Problem("document-attention-slow", reasons=text),
        Problem("alibi-slow", reasons=text),
        Problem("window-attention-slow", reasons=text),
        Problem("explicit-scores-slow", reasons=text),
    )
    return None, slow[subject]


def _try(
    cls: Kind, rule: AttentionRule, keys: Keys, config: ModelConfig, micro_batch: int, shards: int
) -> tuple[AttentionBackend | None, str]:
    """The kernel, or None and why it is not used."""
    try:
        kernel = _build(cls, rule, keys.device)
        error = _max_relative_error(kernel, rule, keys, config, micro_batch, shards)
    except Exception as refusal:  # compilers and devices raise any type
        first_sentence = str(refusal).strip().partition("\n")[0].partition(". ")[0]
        return None, first_sentence or type(refusal).__name__
    if error <= TOLERANCES[keys.dtype]:  # not if the error is nan
        return kernel, ""
    return None, f"its relative error is {error:.2g}"


def candidates(
    rule: AttentionRule, keys: Keys, shards: int, choice: str = "auto"
) -> tuple[Kind, ...]:
    """The kernels to try, fastest first.

    Variable-length attention is flash attention: in half precision. It needs the number of
    documents on the host; of the ranks that share samples, the host of the first one alone reads
    them.
    """
    has_varlen = keys.dtype in (torch.bfloat16, torch.float16) and shards == 1
    kinds: tuple[Kind, ...] = (VarlenKernel,) if has_varlen and choice in ("auto", "flash") else ()
    kinds += (FlexKernel,) if choice == "auto" else ()
    return tuple(cls for cls in kinds if cls.supports(rule, keys))


def _build(cls: Kind, rule: AttentionRule, device: torch.device) -> AttentionBackend:
    """Raises what torch raises where it lacks the function, or on this device."""
    if cls is VarlenKernel:
        return VarlenKernel(_torch_varlen(rule))
    return FlexKernel(_compiled_flex(device))


def _torch_varlen(rule: AttentionRule) -> VarlenAttention:
    """Causal `varlen_attn`, whose parameters differ between torch's versions."""
    from torch.nn.attention import varlen as module

    varlen_attn: Any = module.varlen_attn
    names = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1 if rule.window is None else rule.window - 1, 0)}
    if rule.window is None and "is_causal" in names:
        causal = {"is_causal": True}
    causal |= {} if rule.scale is None else {"scale": rule.scale}

    def varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
        options = dict(causal)
        if q.shape[1] != k.shape[1] and "enable_gqa" in names:
            options["enable_gqa"] = True
        out: Tensor = varlen_attn(q, k, v, starts, starts, longest, longest, **options)
        return out

    return varlen


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
    kernel: AttentionBackend,
    rule: AttentionRule,
    keys: Keys,
    config: ModelConfig,
    micro_batch: int,
    shards: int,
) -> float:
    """The largest of the relative errors of output and gradients against an eager backend.

    Without documents, for the first tokens, which do not depend on later ones.
    """
    length = keys.queries
    count = 6 if keys.has_documents else 0
    compared = length if count else min(length, COMPARED)
    generator = torch.Generator().manual_seed(0)
    is_end = torch.rand((micro_batch, length), generator=generator) * length < count
    packing = PackingOptions(reset_positions=False, reset_attention=True)
    documents = packing.documents(is_end.to(keys.device), micro_batch + int(is_end.sum()))
    keys = replace(keys, documents=documents)
    first = documents.truncated(compared)
    alone = replace(keys, queries=compared, has_documents=True, documents=first)
    kv_heads = max(1, config.kv_heads // shards)
    local_heads = config.num_attention_heads // shards, kv_heads, kv_heads
    dims = config.head_dim, config.head_dim, config.value_dim
    sizes = [heads * size for heads, size in zip(local_heads, dims, strict=True)]
    shape = length, micro_batch, sum(sizes)
    qkv = torch.randn(shape, generator=generator).to(keys.device, keys.dtype).requires_grad_()
    grad = torch.randn((*shape[:2], local_heads[0], config.value_dim), generator=generator)
    grad = grad.permute(1, 2, 0, 3).to(keys.device, keys.dtype)
    grad[:, :, compared:] = 0
    tables = MaskTables(torch.linspace(0.1, 0.5, local_heads[0]).tolist())
    results = []
    sinks = [torch.linspace(-1, 1, local_heads[0], device=keys.device, requires_grad=True)]
    sinks = sinks if rule.sinks else []
    eager = EagerBackend() if rule.needs_scores else PerDocumentBackend()
    for backend, inputs in ((kernel, keys), (eager, alone)):
        size = inputs.queries
        parts = zip(qkv[:size].split(sizes, dim=-1), dims, strict=True)
        q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in parts)
        if rule.rope is not None:  # both are rotated in one tensor
            q, k = torch.cat([q, k], dim=2).split([q.shape[2], k.shape[2]], dim=2)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        out = backend.core(rule, inputs, tables).attend(q, k, v, 0.0, *sinks)
        gradients = torch.autograd.grad(out, (qkv, *sinks), grad[:, :, :size])
        results.append((out.detach()[:, :, :compared].float(), *(x.float() for x in gradients)))
    pairs = zip(*results, strict=True)
    # torch's maximum, unlike Python's, is nan if any is.
    return float(torch.stack([(one - other).norm() / other.norm() for one, other in pairs]).max())
