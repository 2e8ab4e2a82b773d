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

from megatron_ds.config.devices import HOST
from megatron_ds.config.problems import user_error
from megatron_ds.inference.sampling_params import SamplingParams


def prompt_generator(seed: int, index: int) -> torch.Generator:
    """The random stream of the prompt with this index."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return torch.Generator(HOST).manual_seed(int.from_bytes(digest, "big") >> 1)


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
        weights_Bn, ids_Bn = candidates(logits_BV, sampling)
        vocab = logits_BV.shape[-1]
        ids, values = draw(weights_Bn, ids_Bn, vocab, generators, top_p=sampling.top_p)
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
    tokens.

    Returns:
        Probabilities and ids, each [B, n].
    """
    logits_BV = logits_BV.float()
    # The maximum becomes 0 and no other logit positive, so that no quotient overflows to +inf.
    logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    logits_BV = logits_BV / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    vocab = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocab:
        logits_Bn, ids_Bn = logits_BV.topk(sampling.top_k, dim=-1)
        return logits_Bn.softmax(dim=-1), ids_Bn
    ids_Bn = torch.arange(vocab, device=logits_BV.device).expand_as(logits_BV)
    return logits_BV.softmax(dim=-1), ids_Bn


def more_probable(weights_Bn: torch.Tensor, columns_B: torch.Tensor) -> torch.Tensor:
    """Which candidates [B, n] precede one of each row in descending order; equal ones precede it
    from the left."""
    weight_B1 = weights_Bn.gather(-1, columns_B[:, None])
    columns_n = torch.arange(weights_Bn.shape[-1], device=weights_Bn.device)
    is_equal = (weights_Bn == weight_B1) & (columns_n < columns_B[:, None])
    return (weights_Bn > weight_B1) | is_equal


def draw(
    weights_Bn: torch.Tensor,
    ids_Bn: torch.Tensor,
    vocab: int,
    generators: Sequence[torch.Generator],
    *,
    top_p: float = 0.0,
) -> tuple[list[int], list[float]]:
    """Draws an id for each row with a probability proportional to its weight.

    Divides the weights by exponential numbers, one for each id, and takes the largest quotient
    ("Gumbel-max"). So weights that differ by rounding, as those of a batch of another size, give
    another id only if two quotients are equal up to that rounding. The inverse of a cumulative sum
    would add up the differences of a whole vocabulary.

    Top-p (nucleus sampling, Holtzman et al. 2020) keeps the fewest most probable candidates whose
    total probability reaches p. A candidate is outside if those that precede it reach p. If the
    drawn one is, the next quotient decides, without it and what follows it; so nothing is sorted.

    Args:
        weights_Bn: Weights, with the sum 1 where top-p applies.
        ids_Bn: Their ids.
        vocab: Number of ids, for each of which a row draws from its stream.
        generators: One per row.
        top_p: Total probability of the nucleus; 0 and 1 keep all candidates.

    Returns:
        The ids, and the quotients, which are not finite if the weights are not.
    """
    uniform = [torch.rand(vocab, generator=stream) for stream in generators]
    # A uniform number may be 0: without the limit it would exclude even a candidate of weight 1.
    noise_BV = torch.stack(uniform).log_().neg_().clamp_(max=88.0).to(weights_Bn.device)
    quotients_Bn = weights_Bn / noise_BV.gather(-1, ids_Bn)
    highest_B, columns_B = quotients_Bn.max(dim=-1)
    rows = torch.arange(len(weights_Bn), device=weights_Bn.device) if 0.0 < top_p < 1.0 else ()
    while len(rows):
        weights_rn = weights_Bn[rows]
        precedes_rn = more_probable(weights_rn, columns_B[rows])
        # The most probable candidate is inside, also if top_p is 0 in fp32.
        is_outside_r = precedes_rn.any(-1) & ((weights_rn * precedes_rn).sum(dim=-1) >= top_p)
        rows = rows[is_outside_r]
        quotients_Bn[rows] *= precedes_rn[is_outside_r]
        highest_B[rows], columns_B[rows] = quotients_Bn[rows].max(dim=-1)
    ids_B = ids_Bn.gather(-1, columns_B[:, None])[:, 0]
    # fp64 holds both exactly; one transfer.
    values, numbers = torch.stack([highest_B.double(), ids_B.double()]).tolist()
    return [int(number) for number in numbers], values
