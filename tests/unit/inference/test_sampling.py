"""Sampling: candidates, frequencies, random streams, parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_ds.inference.generation import sampling as sampling_module
from megatron_ds.inference.generation.sampling import (
    GAMMA,
    candidates,
    choose,
    draw,
    more_probable,
    noise_key,
    random_bits,
)
from megatron_ds.inference.generation.sampling_params import SamplingParams

SHARES = (0.05, 0.4, 0.25, 0.0, 0.2, 0.1)
"""Probabilities of six tokens; the fourth is padding."""

NOISE_KEY = 3_330_549_719_168_723_193
GOLDEN: dict[tuple[tuple[str, float], ...], list[int]] = {
    (): [772, 194, 897],
    (("temperature", 0.5),): [772, 194, 506],
    (("top_k", 20),): [404, 378, 189],
    (("top_p", 0.3),): [404, 214, 506],
}
ALL = {0: 0.05, 1: 0.4, 2: 0.25, 4: 0.2, 5: 0.1}
THREE = {1: 0.4 / 0.85, 2: 0.25 / 0.85, 4: 0.2 / 0.85}
TWO = {1: 0.4 / 0.65, 2: 0.25 / 0.65}


def logits(rows: int = 1) -> torch.Tensor:
    return torch.tensor([SHARES] * rows).log()


def keys(seed: int, count: int) -> torch.Tensor:
    return torch.tensor([noise_key(seed, 0, position) for position in range(count)])


def random_rows(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))


def tokens_of(logits_BV: torch.Tensor, settings: SamplingParams, seed: int = 0) -> list[int | None]:
    """The chosen tokens; None for a row whose logits are not finite."""
    ids, values = choose(logits_BV, settings, keys(seed, len(logits_BV)).tolist())
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return [token if math.isfinite(value) else None for token, value in pairs]


def drawn_ids(*tensors: torch.Tensor, **options: float) -> list[int]:
    ids: list[int] = draw(*tensors, **options)[0].tolist()
    return ids


def allowed(settings: SamplingParams) -> dict[int, float]:
    """The tokens that are drawn, and their probabilities among the candidates."""
    count = 2000
    weights, ids = candidates(logits(), settings)
    drawn = drawn_ids(weights.expand(count, -1), ids, keys(0, count), top_p=settings.top_p)
    found = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    total = sum(found[token] for token in set(drawn))
    return {token: found[token] / total for token in set(drawn)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *((SamplingParams(top_k=count), ALL) for count in (0, 5000)),
        (SamplingParams(top_k=1), {1: 1.0}),
        (SamplingParams(top_p=1.0), ALL),
        *((SamplingParams(top_p=share), {1: 1.0}) for share in (0.3, 1e-9, 1e-300)),
        # 0.4 + 0.25 < 0.7: the token that crosses 0.7 belongs to the nucleus.
        (SamplingParams(top_k=3), THREE),
        (SamplingParams(top_p=0.7), THREE),
        # Of the three that top-k keeps, 0.4 / 0.85 = 0.47 < 0.5.
        (SamplingParams(top_p=0.6), TWO),
        (SamplingParams(top_k=3, top_p=0.5), TWO),
        (SamplingParams(temperature=0.5, top_k=2), {1: 0.16 / 0.2225, 2: 0.0625 / 0.2225}),
    ],
    ids=str,
)
def test_candidates(settings: SamplingParams, expected: dict[int, float]) -> None:
    found = allowed(settings)

    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_top_p_draws_from_the_first_of_the_sorted_probabilities(
    top_p: float, spread: float
) -> None:
    """Each row's draw is the largest quotient of the nucleus that sorting finds."""
    rows = random_rows(60, 300).mul(spread).softmax(dim=-1)
    ids = torch.arange(300)[None]
    order = rows.argsort(dim=-1, descending=True)
    sums = rows.gather(-1, order).double().cumsum(dim=-1)
    sizes = (sums < top_p).sum(dim=-1) + 1
    nucleus = torch.zeros_like(rows)
    for row, size in enumerate(sizes.tolist()):
        nucleus[row, order[row, :size]] = rows[row, order[row, :size]]

    drawn = drawn_ids(rows, ids, keys(1, 60), top_p=top_p)
    assert drawn == drawn_ids(nucleus, ids, keys(1, 60))


def test_equal_probabilities_are_ordered() -> None:
    """So that the nucleus of a flat distribution has as many candidates as it needs."""
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert more_probable(rows, torch.tensor([2])).tolist() == [[True, True, False, False]]
    rows = rows.expand(200, -1)
    assert set(drawn_ids(rows, torch.arange(4)[None], keys(0, 200), top_p=0.5)) == {0, 1}


@pytest.mark.parametrize("bits", [0, 2**31 - 1])
def test_no_random_number_excludes_a_candidate(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sampling_module, "random_bits", lambda keys, steps: torch.full(steps.shape, bits)
    )
    rows = torch.tensor([[0.0, 1.0, 0.0]])
    ids = torch.arange(3)[None]
    drawn, values = draw(rows, ids, keys(0, 1), top_p=0.9)
    assert drawn.tolist() == [1]
    assert values.isfinite().all()


def test_random_bits_are_those_of_the_published_generator() -> None:
    """Outputs 1 to 5 of SplitMix64's reference implementation from two seeds."""
    expected = {
        0: "e220a8397b1dcdaf 6e789e6aa1b965f4 06c45d188009454f f88bb8a8724c81ec 1b39896a51a8749b",
        1234567: "599ed017fb08fc85 2c73f08458540fa5 883ebce5a3f27c77 3fbef740e9177b3f "
        "e3b8346708cb5ecd",
    }
    steps = torch.arange(1, 6).mul(GAMMA)[None]
    found = random_bits(torch.tensor(list(expected)), steps)
    assert found.tolist() == [
        [int(number, 16) >> 33 for number in numbers.split()] for numbers in expected.values()
    ]


def test_samples_of_a_seed_stay_the_same() -> None:
    """In all versions of the package, on all devices.

    Claim (serving): samples have the frequencies of the softmax, stay those of their seed, and do
    not depend on the batch
    """
    assert noise_key(1234, 0, 7) == NOISE_KEY
    rows = (torch.arange(3 * 1000).view(3, 1000) * 37 % 3001).float() / 1000
    for options, expected in GOLDEN.items():
        assert tokens_of(rows, SamplingParams(**dict(options)), seed=1234) == expected


@pytest.mark.parametrize(
    "settings", [SamplingParams(temperature=1.5), SamplingParams(top_k=40)], ids=str
)
def test_frequencies_match_the_softmax(settings: SamplingParams) -> None:
    """By the chi-square test, whose statistic is within five standard deviations.

    Claim (serving): samples have the frequencies of the softmax, stay those of their seed, and do
    not depend on the batch
    """
    count = 40_000
    row = random_rows(1, 50)
    drawn = torch.tensor(tokens_of(row.expand(count, -1), settings))
    expected = (row / settings.temperature).double()
    if settings.top_k:
        expected[row < row.topk(settings.top_k).values[:, -1:]] = -torch.inf
    expected = expected.softmax(dim=-1)[0] * count
    observed = torch.bincount(drawn, minlength=50)
    is_possible = expected > 0
    assert observed[~is_possible].sum() == 0
    statistic = ((observed - expected)[is_possible].square() / expected[is_possible]).sum()
    freedom = int(is_possible.sum()) - 1
    assert abs(statistic - freedom) < 5.0 * (2 * freedom) ** 0.5


def test_rare_ids_of_large_vocabularies_have_their_frequencies() -> None:
    """Where the smallest of many random numbers decides, its resolution must suffice."""
    vocab = 100_000
    count = 400
    row = torch.zeros(1, vocab)
    row[:, vocab // 2 :] = math.log(3.0)
    drawn = torch.tensor(tokens_of(row.expand(count, -1), SamplingParams()))
    # Five standard deviations.
    assert abs((drawn >= vocab // 2).double().mean() - 0.75) < 5.0 * (0.75 * 0.25 / count) ** 0.5
    assert len(drawn.unique()) > 0.98 * count


def test_an_id_without_weight_is_never_drawn() -> None:
    rows = torch.tensor([[0.0, 1e-30, 0.0]] * 100)
    ids = torch.tensor([[4, 2, 7]] * 100)
    assert drawn_ids(rows, ids, keys(3, 100)) == [2] * 100


def test_rounding_and_the_order_of_candidates_change_no_sample() -> None:
    """Of a flat distribution over a large vocabulary, where a cumulative sum would add it up."""
    rows = random_rows(40, 50_000) * 0.1
    noise = random_rows(40, 50_000, seed=1) * 1e-7
    for options in ({}, {"top_p": 0.01}, {"top_k": 40}, {"top_k": 0, "top_p": 0.9}):
        params = SamplingParams(**options)
        first, second = (tokens_of(each, params, seed=5) for each in (rows, rows + noise))
        assert first == second
        assert len(set(first)) > 20


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_a_sample_does_not_depend_on_the_other_rows(options: dict[str, Any]) -> None:
    """Claim (serving): samples have the frequencies of the softmax, stay those of their seed, and
    do not depend on the batch"""
    params = SamplingParams(**options)
    rows = logits(50)
    together = tokens_of(rows, params, seed=7)
    alone = [choose(rows[:1], params, [key])[0].item() for key in keys(7, 50).tolist()]

    assert together == alone
    assert len(set(together)) > 1


def test_keys_differ_by_seed_index_and_position() -> None:
    places = [(1, 0, 0), (1, 1, 0), (2, 0, 0), (11, 0, 0), (1, 10, 0), (1, 0, 1), (1, 0, 10)]
    assert len({noise_key(*place) for place in places}) == len(places)


def test_parameters_of_sampling_have_no_effect_on_greedy_decoding() -> None:
    plain, _ = choose(logits(), SamplingParams(greedy=True), [])
    options = SamplingParams(greedy=True, top_k=4, top_p=0.1, temperature=9.0)
    assert choose(logits(), options, [])[0] == plain == 1
    assert list(options.problems()) == []


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-40, 1e-30, 1e-5])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_smallest_temperatures_take_the_most_probable_token(
    temperature: float, options: dict[str, Any]
) -> None:
    """Claim (serving): the smallest temperature takes the most probable token, and logits that are
    not finite are an error"""
    row = torch.tensor([[90.0, 80.0, 95.0, -torch.inf]])
    params = SamplingParams(temperature=temperature, **options)
    for scale in (1.0, -1.0, 1e30):
        expected = [1] if scale < 0 else [2]
        scaled = torch.cat([row[:, :3] * scale, row[:, 3:]], dim=1)
        assert tokens_of(scaled, params, seed=1) == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{"greedy": True}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_only_rows_with_finite_logits_have_a_token(value: float, options: dict[str, Any]) -> None:
    """Claim (serving): the smallest temperature takes the most probable token, and logits that are
    not finite are an error"""
    broken = logits(3)
    broken[1, 3] = value
    first, second, third = tokens_of(broken, SamplingParams(**options), seed=1)
    assert second is None
    assert first is not None
    assert third is not None


def test_all_problems_are_reported_at_once() -> None:
    assert len(list(SamplingParams(-1.0, -1, 2.0, seed=-1).problems())) == 4
    assert list(SamplingParams().problems()) == []
    assert list(SamplingParams(greedy=True).problems()) == []
