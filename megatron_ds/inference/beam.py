"""Beam search: the most probable continuations of one prompt. Ids in, ids out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_ds.inference.generate import Cancelled, StopRules, eval_mode
from megatron_ds.inference.kv_cache import PreallocatedCache
from megatron_ds.model.gpt import GPTModel


@dataclass(frozen=True)
class Hypothesis:
    """A continuation, without the prompt, and how good it is."""

    ids: list[int]
    score: float


@dataclass(frozen=True)
class _Beam:
    """A continuation that has not ended."""

    ids: list[int]
    logprob: float


def beam_search(
    model: GPTModel,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    width: int,
    stop_token: int,
    length_penalty: float = 1.0,
    rules: StopRules | None = None,
    go_on: Callable[[], bool] | None = None,
) -> list[Hypothesis]:
    """At most `width` continuations, the best first: each ends with stop_token or is
    max_new_tokens long.

    Score, as Megatron's: the sum of a continuation's log-probabilities / its length to the power of
    length_penalty. Each step takes the 2 x width most probable extensions of the beams; those that
    end are kept if they are among the first `width`, of the others `width` stay as beams. It is
    over when no beam, were it to end now, would be better than the worst of `width` ended ones.
    Of the rules only the forbidden tokens count. go_on: as of `generate`.
    """

    def hypothesis(beam: _Beam) -> Hypothesis:
        return Hypothesis(beam.ids, beam.logprob / len(beam.ids) ** length_penalty)

    device = next(model.parameters()).device
    store = PreallocatedCache(model.config.layers, len(prompt) + max_new_tokens - 1)
    beams, ended = [_Beam([], 0.0)], list[Hypothesis]()
    tokens = [list(prompt)]
    with torch.no_grad(), eval_mode(model):
        for _ in range(max_new_tokens):
            if go_on is not None and not go_on():
                raise Cancelled
            logits_BV = model(torch.tensor(tokens, device=device), cache=store, last_only=True)
            logprobs_BV = logits_BV[:, 0].log_softmax(dim=-1)
            if rules is not None:
                for row, previous in enumerate(tokens):
                    logprobs_BV[row, list(rules.forbidden(previous[-1]))] = -torch.inf
            grown = _best_extensions(beams, logprobs_BV, 2 * width)
            ends = [beam for _, beam in grown[:width] if beam.ids[-1] == stop_token]
            ended = _best([*ended, *map(hypothesis, ends)], width)
            grown = [(row, beam) for row, beam in grown if beam.ids[-1] != stop_token][:width]
            beams = [beam for _, beam in grown]
            best_open = max((hypothesis(beam).score for beam in beams), default=-torch.inf)
            if not beams or (len(ended) == width and ended[-1].score >= best_open):
                return ended
            store.keep([row for row, _ in grown])
            tokens = [[beam.ids[-1]] for beam in beams]
    return _best([*ended, *map(hypothesis, beams)], width)


def _best_extensions(
    beams: Sequence[_Beam], logprobs_BV: torch.Tensor, count: int
) -> list[tuple[int, _Beam]]:
    """The most probable beams that are longer by one token, each with the row it grew from."""
    vocab = logprobs_BV.shape[-1]
    before_B = torch.tensor([beam.logprob for beam in beams], dtype=torch.float64)
    sums = (before_B[:, None] + logprobs_BV.double().cpu()).flatten()
    values, places = sums.topk(min(count, sums.numel()))
    return [
        (place // vocab, _Beam([*beams[place // vocab].ids, place % vocab], value))
        for place, value in zip(places.tolist(), values.tolist(), strict=True)
        if value > -torch.inf
    ]


def _best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda each: each.score, reverse=True)[:count]
