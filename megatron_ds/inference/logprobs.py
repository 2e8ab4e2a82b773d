"""Log-probabilities of the tokens of a text. Ids in, numbers out; must not know tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ds.inference.generate import ShouldContinue, check_cancelled
from megatron_ds.inference.kv_cache import PreallocatedCache
from megatron_ds.inference.sampling import check_finite
from megatron_ds.model.gpt import GPTModel

CHUNK_TOKENS = 128
"""Tokens whose logits are in memory together; all logits of a text may not fit."""


@dataclass(frozen=True)
class Scores:
    """Natural logarithms of probabilities, for every token but the first."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    """The most probable ids at each position and their log-probabilities, in descending order."""


def score(
    model: GPTModel,
    ids: Sequence[int],
    *,
    top_n: int = 0,
    should_continue: ShouldContinue | None = None,
) -> Scores:
    """Scores a text with the model's probabilities, without temperature, top-k and top-p.

    Collective on tensor-parallel ranks, with equal arguments.

    Args:
        model: This rank's shard of the model, in evaluation mode.
        ids: Ids of the text.
        top_n: Number of most probable ids to return for each position.
        should_continue: See `ShouldContinue`.

    Raises:
        Cancelled: If `should_continue` returned False.
        UserError: If the model's logits are not finite.
    """
    scores = Scores([], [])
    device = next(model.parameters()).device
    cache = PreallocatedCache(model.config.num_layers, len(ids))
    with torch.no_grad():
        for start in range(0, len(ids) - 1, CHUNK_TOKENS):
            check_cancelled(should_continue)
            end = min(start + CHUNK_TOKENS, len(ids) - 1)
            logits_SV = model(torch.tensor([ids[start:end]], device=device), cache=cache)[0]
            logprobs_SV = logits_SV.log_softmax(dim=-1)
            following = torch.tensor(ids[start + 1 : end + 1], device=device)
            chosen: list[float] = logprobs_SV.gather(-1, following[:, None])[:, 0].tolist()
            check_finite(chosen)
            scores.logprobs.extend(chosen)
            values, tokens = logprobs_SV.topk(min(top_n, model.config.vocab_size), dim=-1)
            for row, numbers in zip(tokens.tolist(), values.tolist(), strict=True):
                scores.top.append(list(zip(row, numbers, strict=True)))
    return scores
