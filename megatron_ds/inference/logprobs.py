"""How probable a text is, token by token. Ids in, numbers out; knows no tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_ds.inference.generate import Cancelled, eval_mode
from megatron_ds.inference.kv_cache import PreallocatedCache
from megatron_ds.model.gpt import GPTModel

PIECE = 128
"""Tokens whose logits are in memory together: a whole text's may not fit."""


@dataclass(frozen=True)
class Scores:
    """Natural logarithms of probabilities, for every token but the first, which follows nothing."""

    logprobs: list[float]
    top: list[list[tuple[int, float]]]
    """The most probable ids in each token's place, in falling order."""


def score(
    model: GPTModel,
    ids: Sequence[int],
    *,
    top_n: int = 0,
    go_on: Callable[[], bool] | None = None,
) -> Scores:
    """The model's own probabilities of a text, before temperature and the like.

    go_on: as of `generate`. On tensor-parallel ranks it is collective, with the same arguments.
    """
    scores = Scores([], [])
    device = next(model.parameters()).device
    store = PreallocatedCache(model.config.layers, len(ids))
    with torch.no_grad(), eval_mode(model):
        for start in range(0, len(ids) - 1, PIECE):
            if go_on is not None and not go_on():
                raise Cancelled
            end = min(start + PIECE, len(ids) - 1)
            logits_SV = model(torch.tensor([ids[start:end]], device=device), cache=store)[0]
            logprobs_SV = logits_SV.log_softmax(dim=-1)
            following = torch.tensor(ids[start + 1 : end + 1], device=device)
            scores.logprobs.extend(logprobs_SV.gather(-1, following[:, None])[:, 0].tolist())
            values, tokens = logprobs_SV.topk(min(top_n, model.config.vocab), dim=-1)
            for row, numbers in zip(tokens.tolist(), values.tolist(), strict=True):
                scores.top.append(list(zip(row, numbers, strict=True)))
    return scores
