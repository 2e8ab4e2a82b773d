"""A tiny model, and a dense reference of flex attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config import ModelConfig, RecomputeConfig
from megatron_ds.model.attention.backends import CALLERS, AttentionOptions
from megatron_ds.model.attention.packed import AttentionBackend, Documents, PackingOptions
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
TINY |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def build_model(
    config: ModelConfig,
    recompute: str | None = None,
    *,
    packing: PackingOptions | None = None,
    attention: AttentionOptions = CALLERS,
    **options: Any,
) -> GPTModel:
    """The model in one process."""
    assert list(config.problems(1)) == []
    rng = RngStreams(0)
    how = ActivationCheckpointing(RecomputeConfig(recompute_granularity=recompute), rng)
    options["attention"] = dataclasses.replace(attention, packing=packing)
    return GPTModel(config, mesh=Mesh.single(), rng=rng, seed=3, checkpointing=how, **options)


def documents_of(
    model: GPTModel, tokens_BS: Tensor, eod: int, max_documents: int | None = None
) -> Documents | None:
    """The documents that end with `eod`, if the model has boundaries."""
    packing = model.attention.packing
    return None if packing is None else packing.documents(tokens_BS == eod, max_documents)


def computed_by(kernel: AttentionBackend | None, config: ModelConfig) -> AttentionOptions:
    """A kernel that computes the attention of all layers."""
    rules = {} if kernel is None else dict.fromkeys(attention_rules(config), kernel)
    return AttentionOptions(kernels=rules)


def gradients(model: GPTModel) -> dict[str, Tensor]:
    """The gradients of the parameters that have one, by name."""
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


def dense_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    enable_gqa: bool,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Flex attention that computes every score, on any device and with gradients."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *at)
    hidden = ~block_mask.mask_mod(*at)
    scores = scores.masked_fill(hidden, -torch.inf)
    attended = scores.softmax(-1) @ v
    return (attended, scores.logsumexp(-1)) if return_lse else attended


def dense_varlen(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, window: int | None = None
) -> Tensor:
    """Variable-length attention that computes every score, on any device."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    at = torch.arange(q.shape[0], dtype=starts.dtype)
    document = torch.searchsorted(starts, at, right=True)
    distance = at.unsqueeze(1) - at
    visible = (document.unsqueeze(1) == document) & (distance >= 0)
    visible &= distance < (longest if window is None else window)
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1)
