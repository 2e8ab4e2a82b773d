"""Beam search: the most probable continuations of one prompt. Ids in, ids out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from megatron_ds.inference.generation.device_inputs import to_device
from megatron_ds.inference.generation.kv_cache import PreallocatedCache
from megatron_ds.inference.generation.sampling import check_finite, exclude_
from megatron_ds.inference.generation.stop_rules import StopRules
from megatron_ds.model.attention.cores import VARYING_SIZES, backends_in_order
from megatron_ds.model.gpt import GPTModel


@dataclass(frozen=True)
class BeamSearchConfig:
    """Settings of a beam search."""

    max_new_tokens: int
    width: int
    """Number of beams, and of results."""
    stop_token: int
    length_penalty: float = 1.0
    """Exponent p of the score: the summed log-probability divided by length ** p."""
    rules: StopRules | None = None
    """Only the forbidden tokens count."""
    further_stops: frozenset[int] = frozenset()
    """Tokens that end a continuation as `stop_token` does."""


@dataclass(frozen=True)
class Hypothesis:
    """A continuation, without the prompt, and its score.

    While it is in progress, the score is the sum of its log-probabilities.
    """

    ids: list[int]
    score: float

    def ended(self, length_penalty: float) -> Hypothesis:
        return Hypothesis(self.ids, self.score / len(self.ids) ** length_penalty)


def beam_search(
    model: GPTModel, prompt: Sequence[int], config: BeamSearchConfig
) -> Generator[None, None, list[Hypothesis]]:
    """Searches as Megatron does, and stops after each token. Collective on tensor-parallel ranks,
    with equal arguments.

    The score is the sum of a continuation's log-probabilities divided by length ** length_penalty.
    Each step takes the 2 x width most probable extensions of the beams. Those that end are kept if
    they are among the first `width`; of the rest, `width` remain as beams. The search ends when no
    beam, if it ended now, would have a higher score than the worst of `width` ended ones.

    Args:
        model: This rank's shard of the model, in evaluation mode.
        prompt: Ids of the prompt.
        config: Options of the search.

    Returns:
        At most `width` continuations, the best first. Each ends with a stop token or has the
        maximal length.

    Raises:
        UserError: If the model's logits are not finite.
    """
    weight = next(model.parameters())
    width = config.width
    penalty = config.length_penalty
    stops = config.further_stops | {config.stop_token}
    capacity = len(prompt) + config.max_new_tokens - 1
    windows = [block.rule.window for block in model.blocks()]
    cache = PreallocatedCache(width, capacity, weight, windows)
    beams = [Hypothesis([], 0.0)]
    ended = list[Hypothesis]()
    tokens = [list(prompt)]
    for _ in range(config.max_new_tokens):
        tokens_BS = to_device(tokens, weight.device)
        view = cache.view(0, [len(tokens[0])] * len(tokens))
        with torch.no_grad(), backends_in_order(VARYING_SIZES, weight.device):
            last_1BH = model.hidden(tokens_BS, view)[-1:]
            logprobs_BV = model.logits(last_1BH)[:, 0].log_softmax(dim=-1)
        if config.rules is not None:
            exclude_(logprobs_BV, (config.rules.forbidden(ids[-1]) for ids in tokens))
        grown = _best_extensions(beams, logprobs_BV, 2 * width)
        ends = [beam for _, beam in grown[:width] if beam.ids[-1] in stops]
        ended = _best([*ended, *(beam.ended(penalty) for beam in ends)], width)
        grown = [beam for beam in grown if beam[1].ids[-1] not in stops][:width]
        beams = [beam for _, beam in grown]
        best_open = max((beam.ended(penalty).score for beam in beams), default=-torch.inf)
        if not beams or (len(ended) == width and ended[-1].score >= best_open):
            return ended
        cache.reorder([row for row, _ in grown])
        tokens = [[beam.ids[-1]] for beam in beams]
        yield
    return _best([*ended, *(beam.ended(penalty) for beam in beams)], width)


def _best_extensions(
    beams: Sequence[Hypothesis], logprobs_BV: torch.Tensor, count: int
) -> list[tuple[int, Hypothesis]]:
    """The most probable beams with one more token, each with the row that it extends."""
    vocab = logprobs_BV.shape[-1]
    # fp64: the differences between long sums are small.
    sums_B = torch.tensor([beam.score for beam in beams], dtype=torch.float64)
    sums = (sums_B[:, None] + logprobs_BV.cpu().double()).flatten()
    check_finite(sums.max().view(1).tolist())  # NaN if any sum is
    values, indexes = sums.topk(min(count, sums.numel()))
    return [
        (index // vocab, Hypothesis([*beams[index // vocab].ids, index % vocab], value))
        for index, value in zip(indexes.tolist(), values.tolist(), strict=True)
        if value > -torch.inf
    ]


def _best(hypotheses: list[Hypothesis], count: int) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: hypothesis.score, reverse=True)[:count]
