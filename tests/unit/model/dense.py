"""A tiny configuration, and a dense reference of flex attention."""

from __future__ import annotations

from typing import Any

import torch

TINY: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
TINY |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}


def dense_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    score_mod: Any,
    block_mask: Any,
    enable_gqa: bool,
) -> torch.Tensor:
    """Flex attention that computes every score, on any device and with gradients."""
    assert enable_gqa == (q.shape[1] != k.shape[1])
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    at = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *at)
    hidden = ~block_mask.mask_mod(*at)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
