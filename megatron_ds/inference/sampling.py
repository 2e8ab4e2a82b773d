"""Sampling of the next token: pure functions of logits, parameters and generators.

The vocabulary's padding has the logit -inf and is never chosen. Every prompt has its own generator,
on the CPU, so that its sample depends neither on the other prompts nor on the device (except by
rounding of the logits), and all tensor-parallel ranks, which have the same logits, draw the same
token.

Shapes: B prompts, V vocabulary, n candidates of each prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch

from megatron_ds.config.problems import user_error
from megatron_ds.inference.sampling_params import SamplingParams

TOP_P_CANDIDATES = 1024
"""Most probable tokens that top-p tries first: sorting the full vocabulary takes longer than the
forward pass of a small model."""


def prompt_generator(seed: int, index: int) -> torch.Generator:
    """The random stream of the prompt with this index."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)


def choose(
    logits_BV: torch.Tensor, sampling: SamplingParams, generators: Sequence[torch.Generator]
) -> list[int | None]:
    """Chooses the next token of every row.

    Args:
        logits_BV: Logits.
        sampling: Parameters of all rows.
        generators: One per row, from which the row draws once, or not at all if greedy.

    Returns:
        An id for each row; None for a row without a finite maximum. The values are compared on the
        CPU, with the transfer that the choice needs, so that the device is not synchronized more
        often.
    """
    if sampling.greedy:
        highest, chosen = logits_BV.float().max(dim=-1)
        # fp32 holds the ids of any vocabulary exactly.
        values, ids = torch.stack([highest, chosen.float()]).tolist()
    else:
        ids, values = draw(*candidates(logits_BV, sampling), logits_BV.shape[-1], generators)
    return [
        int(number) if math.isfinite(value) else None
        for number, value in zip(ids, values, strict=True)
    ]


def check_finite(values: Iterable[float]) -> None:
    """
    Args:
        values: Numbers that are finite if the model's logits are.

    Raises:
        UserError: If one is not.
    """
    if not all(map(math.isfinite, values)):
        raise user_error("logits-not-finite")


def candidates(
    logits_BV: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates for the next token.

    The logits, less their maximum, are divided by the temperature. Top-k keeps the k most probable
    tokens. Among these, top-p (nucleus sampling, Holtzman et al. 2020) keeps the fewest most
    probable tokens whose total probability reaches p.

    Returns:
        Unnormalized probabilities, 0 for excluded tokens, and ids, each [B, n].
    """
    logits_BV = logits_BV.float()
    # The maximum becomes 0 and no other logit positive, so that no quotient overflows to +inf.
    logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    logits_BV = logits_BV / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    vocab = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocab:
        logits_Bn, ids = logits_BV.topk(sampling.top_k, dim=-1)
        probabilities = logits_Bn.softmax(dim=-1)
        return _nucleus(probabilities, sampling.top_p), ids
    probabilities = logits_BV.softmax(dim=-1)
    if 0.0 < sampling.top_p < 1.0:
        highest, ids = probabilities.topk(min(TOP_P_CANDIDATES, vocab), dim=-1)
        if (highest.sum(dim=-1) < sampling.top_p).any():
            highest, ids = probabilities.topk(vocab, dim=-1)
        return _nucleus(highest, sampling.top_p), ids
    return probabilities, torch.arange(vocab, device=logits_BV.device).expand_as(probabilities)


def _nucleus(probabilities_Bn: torch.Tensor, p: float) -> torch.Tensor:
    """Sets candidates to 0 after the one with which the sum reaches p; 0 and 1 keep all.

    The candidates are in descending order.
    """
    if not 0.0 < p < 1.0:
        return probabilities_Bn
    preceding = probabilities_Bn.cumsum(dim=-1) - probabilities_Bn
    is_excluded = preceding >= p
    is_excluded[:, 0] = False
    return probabilities_Bn.masked_fill(is_excluded, 0.0)


def draw(
    weights_Bn: torch.Tensor,
    ids_Bn: torch.Tensor,
    vocab: int,
    generators: Sequence[torch.Generator],
) -> tuple[list[int], list[float]]:
    """Draws an id for each row with a probability proportional to its weight.

    Divides the weights by exponential numbers, one for each id, and takes the largest quotient
    ("Gumbel-max"). So weights that differ by rounding, as those of a batch of another size, give
    another id only if two quotients are equal up to that rounding. The inverse of a cumulative sum
    would add up the differences of a whole vocabulary.

    Args:
        weights_Bn: Weights.
        ids_Bn: Their ids.
        vocab: Number of ids, for each of which a row draws from its stream.
        generators: One per row.

    Returns:
        The ids, and the quotients, which are not finite if the weights are not.
    """
    uniform = [torch.rand(vocab, generator=stream) for stream in generators]
    noise_BV = torch.stack(uniform).log_().neg_().to(weights_Bn.device)
    highest, columns = (weights_Bn / noise_BV.gather(-1, ids_Bn)).max(dim=-1)
    ids = ids_Bn.gather(-1, columns[:, None])[:, 0]
    # fp64 holds both exactly; one transfer.
    values, numbers = torch.stack([highest.double(), ids.double()]).tolist()
    return [int(number) for number in numbers], values
