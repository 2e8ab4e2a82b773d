"""Sampling of the next token: pure functions of logits, parameters and keys of random numbers.

The vocabulary's padding has the logit -inf and is never chosen. The random number of a token is a
hash of the seed, the prompt's number, the position and the id, computed where the logits are. Its
bits are the same on every device, in every batch and on all tensor-parallel ranks. So two devices
choose different tokens only where the logits, or the two largest quotients of `draw`, are equal up
to the rounding of fp32.

Shapes: B prompts, V vocabulary, n candidates of each prompt.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch

from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import user_error
from megatron_ds.inference.generation.device_inputs import to_device
from megatron_ds.inference.generation.sampling_params import SamplingParams

GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIXING = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
"""Constants of SplitMix64 as signed numbers: the step of its state, shifts and factors."""
CACHED_NUMBERS = 2**16
"""Numbers that are hashed at a time on a CPU, in its cache."""


def noise_key(seed: int, index: int, position: int) -> int:
    """The key of the random numbers of a token.

    Args:
        seed: Seed of the request.
        index: Number of the prompt.
        position: Position of the token in its text.
    """
    digest = hashlib.blake2b(f"{seed}:{index}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def random_bits(keys_B: torch.Tensor, steps_Bn: torch.Tensor) -> torch.Tensor:
    """The upper 31 bits of outputs of SplitMix64 (Steele et al. 2014).

    Integers only, whose products wrap around on every device.

    Args:
        keys_B: Seeds of the generator, int64.
        steps_Bn: Number of each output, from 1, times `GAMMA`, int64.

    Returns:
        [B, n], int64.
    """
    bits_Bn = steps_Bn + keys_B[:, None]
    for shift, factor in MIXING:
        # Right shifts of negative numbers fill with ones.
        bits_Bn ^= (bits_Bn >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        bits_Bn *= factor
    # The generator's last step changes lower bits only.
    return (bits_Bn >> 33).bitwise_and_(2**31 - 1)


def choose(
    logits_BV: torch.Tensor, sampling: SamplingParams, keys: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the next token of every row, without waiting for the device unless top-p is used.

    Args:
        logits_BV: Logits.
        sampling: Parameters of all rows.
        keys: `noise_key` of each row; not used if greedy.

    Returns:
        Ids [B], and values [B] in fp32 that are finite if the row's logits have a finite maximum.
    """
    if sampling.greedy:
        values_B, ids_B = logits_BV.float().max(dim=-1)
        return ids_B, values_B
    weights_Bn, ids_Bn = candidates(logits_BV, sampling)
    return draw(weights_Bn, ids_Bn, to_device(keys, logits_BV.device), top_p=sampling.top_p)


def exclude_(logits_BV: torch.Tensor, ids: Iterable[Iterable[int]]) -> None:
    """Gives ids of each row the logit -inf."""
    places = [(row, token) for row, numbers in enumerate(ids) for token in numbers]
    if places:
        rows, columns = to_device(places, logits_BV.device).unbind(1)
        # A plain number would be copied from the host, which would wait for the device.
        logits_BV.index_put_((rows, columns), logits_BV.new_full((), -torch.inf))


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
        Probabilities [B, n] and ids [B, n], or [1, n] where all rows have the same ids.
    """
    logits_BV = logits_BV.float()
    # The maximum becomes 0 and no other logit positive, so that no quotient overflows to +inf.
    logits_BV = logits_BV - logits_BV.amax(dim=-1, keepdim=True)
    logits_BV = logits_BV / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    vocab = logits_BV.shape[-1]
    if 0 < sampling.top_k < vocab:
        logits_Bn, ids_Bn = logits_BV.topk(sampling.top_k, dim=-1)
        return logits_Bn.softmax(dim=-1), ids_Bn
    return logits_BV.softmax(dim=-1), torch.arange(vocab, device=logits_BV.device)[None]


def more_probable(weights_Bn: torch.Tensor, columns_B: torch.Tensor) -> torch.Tensor:
    """Whether each candidate [B, n] precedes one of its row in descending order; equal ones precede
    it from the left."""
    weight_B1 = weights_Bn.gather(-1, columns_B[:, None])
    columns_n = torch.arange(weights_Bn.shape[-1], device=weights_Bn.device)
    is_equal = (weights_Bn == weight_B1) & (columns_n < columns_B[:, None])
    return (weights_Bn > weight_B1) | is_equal


def draw(
    weights_Bn: torch.Tensor, ids_Bn: torch.Tensor, keys_B: torch.Tensor, *, top_p: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws an id for each row with a probability proportional to its weight.

    Divides the weights by exponential numbers, one for each id, and takes the largest quotient
    ("Gumbel-max"). So weights that differ by rounding, as in a batch of another size, give
    another id only if two quotients are equal up to that rounding. The inverse of a cumulative sum
    would add up the differences of an entire vocabulary.

    Top-p (nucleus sampling, Holtzman et al. 2020) keeps the fewest most probable candidates whose
    total probability reaches p. A candidate is outside if those that precede it reach p. If the
    drawn one is, the next quotient decides, without it and what follows it; so nothing is sorted.

    Args:
        weights_Bn: Weights, with the sum 1 where top-p applies.
        ids_Bn: Their ids, or [1, n] for all rows.
        keys_B: Keys of the random numbers.
        top_p: Total probability of the nucleus; 0 and 1 keep all candidates.

    Returns:
        The ids, and the quotients, which are not finite if the weights are not.
    """
    quotients_Bn = divide_by_noise(weights_Bn, ids_Bn, keys_B)
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
    return ids_Bn.expand_as(weights_Bn).gather(-1, columns_B[:, None])[:, 0], highest_B


def divide_by_noise(
    weights_Bn: torch.Tensor, ids_Bn: torch.Tensor, keys_B: torch.Tensor
) -> torch.Tensor:
    """The quotients of `draw`, [B, n]."""
    steps_Bn = ((ids_Bn + 1) * GAMMA).expand_as(weights_Bn)
    rows, size = weights_Bn.shape
    at_once = max(1, CACHED_NUMBERS // size) if is_host(weights_Bn.device.type) else rows
    if rows <= at_once:
        return _quotients(weights_Bn, steps_Bn, keys_B)
    parts = (tensor.split(at_once) for tensor in (weights_Bn, steps_Bn, keys_B))
    return torch.cat(list(map(_quotients, *parts)))


def _quotients(
    weights_Bn: torch.Tensor, steps_Bn: torch.Tensor, keys_B: torch.Tensor
) -> torch.Tensor:
    uniform_Bn = random_bits(keys_B, steps_Bn).float().mul_(-(2.0**-31))
    # Limits for the uniform numbers 0, one in a few thousand tokens, and 1.
    return weights_Bn / uniform_Bn.log1p_().neg_().clamp_(2.0**-32, 88.0)
