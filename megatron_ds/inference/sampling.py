"""From logits to the next token: pure functions of logits, settings and generators.

The vocabulary's padding comes as -inf and is never chosen. Every prompt has a generator of its own,
on the CPU, so that its sample depends neither on the prompts beside it nor on the device (but for
the rounding of the logits), and all tensor-parallel ranks, which hold the same logits, draw the
same token.

Shapes: B prompts, V vocabulary, n candidates of each prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from megatron_ds.inference.sampling_params import SamplingParams

USUAL_NUCLEUS = 1024
"""Candidates among which top-p looks first: sorting a whole vocabulary takes longer than a small
model's forward pass."""


def generator_of(seed: int, index: int) -> torch.Generator:
    """The random stream of the prompt with this number."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)


def choose(
    logits_BV: torch.Tensor, sampling: SamplingParams, generators: Sequence[torch.Generator]
) -> list[int]:
    """The next token of every row; row i draws once from generators[i], or not at all if greedy."""
    if sampling.greedy:
        chosen = logits_BV.argmax(dim=-1, keepdim=True)
    else:
        probabilities_Bn, ids_Bn = candidates(logits_BV, sampling)
        chosen = ids_Bn.gather(-1, draw(probabilities_Bn, generators).to(ids_Bn.device))
    tokens: list[int] = chosen.flatten().tolist()
    return tokens


def candidates(
    logits_BV: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """What may be drawn: probabilities (not normalised; 0 is never drawn) and ids, each [B, n].

    The logits are divided by the temperature; then top-k keeps the k most probable tokens, and of
    those top-p (nucleus sampling, Holtzman et al. 2020) the most probable ones up to the one with
    which their share reaches p.
    """
    logits_BV = logits_BV.float() / sampling.temperature
    vocab = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocab:
        logits_Bn, ids = logits_BV.topk(sampling.top_k, dim=-1)
        probabilities = logits_Bn.softmax(dim=-1)
        return _nucleus(probabilities, sampling.top_p), ids
    probabilities = logits_BV.softmax(dim=-1)
    if 0.0 < sampling.top_p < 1.0:
        highest, ids = probabilities.topk(min(USUAL_NUCLEUS, vocab), dim=-1)
        if (highest.sum(dim=-1) < sampling.top_p).any():
            highest, ids = probabilities.topk(vocab, dim=-1)
        return _nucleus(highest, sampling.top_p), ids
    return probabilities, torch.arange(vocab, device=logits_BV.device).expand_as(probabilities)


def _nucleus(probabilities_Bn: torch.Tensor, p: float) -> torch.Tensor:
    """Zeros after the candidate with which the sum reaches p; the candidates are in falling order.
    0 or 1: all stay."""
    if not 0.0 < p < 1.0:
        return probabilities_Bn
    before = probabilities_Bn.cumsum(dim=-1) - probabilities_Bn
    outside = before >= p
    outside[:, 0] = False
    return probabilities_Bn.masked_fill(outside, 0.0)


def draw(weights_Bn: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """A column [B, 1] for each row, as probable as its share of the row's sum; on the CPU.

    One uniform number per row is looked up in the cumulative sum. torch.multinomial draws a number
    per column, which takes milliseconds for a vocabulary.
    """
    sums = weights_Bn.cpu().double().cumsum(dim=-1)
    total = sums[:, -1:].contiguous()
    uniform = [torch.rand(1, generator=each, dtype=torch.float64) for each in generators]
    found = torch.searchsorted(sums, torch.stack(uniform) * total, right=True)
    # A product rounded up to the total would lie behind the last column that has any weight.
    return found.minimum(torch.searchsorted(sums, total))
