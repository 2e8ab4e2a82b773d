"""Sampling: candidates, frequencies, random streams, parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_ds.inference.sampling import (
    candidates,
    choose,
    draw,
    more_probable,
    prompt_generator,
)
from megatron_ds.inference.sampling_params import SamplingParams

SHARES = (0.05, 0.4, 0.25, 0.0, 0.2, 0.1)
"""Probabilities of six tokens; the fourth is padding."""


ALL = {0: 0.05, 1: 0.4, 2: 0.25, 4: 0.2, 5: 0.1}
THREE = {1: 0.4 / 0.85, 2: 0.25 / 0.85, 4: 0.2 / 0.85}
TWO = {1: 0.4 / 0.65, 2: 0.25 / 0.65}


def logits(rows: int = 1) -> torch.Tensor:
    return torch.tensor([SHARES] * rows).log()


def allowed(settings: SamplingParams) -> dict[int, float]:
    """The tokens that are drawn, and their probabilities among the candidates."""
    count = 2000
    weights, ids = candidates(logits(), settings)
    rows, streams = (each.expand(count, -1) for each in (weights, ids)), range(count)
    generators = [prompt_generator(0, index) for index in streams]
    drawn, _ = draw(*rows, len(SHARES), generators, top_p=settings.top_p)
    found = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    total = sum(found[token] for token in set(drawn))
    return {token: found[token] / total for token in set(drawn)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *((SamplingParams(top_k=count), ALL) for count in (0, 5000)),
        *((SamplingParams(top_k=1), {1: 1.0}), (SamplingParams(top_p=1.0), ALL)),
        *((SamplingParams(top_p=share), {1: 1.0}) for share in (0.3, 1e-9, 1e-300)),
        # 0.4 + 0.25 < 0.7: the token that crosses 0.7 belongs to the nucleus.
        *((SamplingParams(top_k=3), THREE), (SamplingParams(top_p=0.7), THREE)),
        # Of the three that top-k keeps, 0.4 / 0.85 = 0.47 < 0.5.
        *((SamplingParams(top_p=0.6), TWO), (SamplingParams(top_k=3, top_p=0.5), TWO)),
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
    rows = torch.randn(60, 300, generator=prompt_generator(0, 0)).mul(spread).softmax(dim=-1)
    ids = torch.arange(300).expand(60, -1)
    order = rows.argsort(dim=-1, descending=True)
    sums = rows.gather(-1, order).double().cumsum(dim=-1)
    sizes = (sums < top_p).sum(dim=-1) + 1
    nucleus = torch.zeros_like(rows)
    for row, size in enumerate(sizes.tolist()):
        nucleus[row, order[row, :size]] = rows[row, order[row, :size]]

    def streams() -> list[torch.Generator]:
        return [prompt_generator(1, row) for row in range(60)]

    drawn, _ = draw(rows, ids, 300, streams(), top_p=top_p)
    assert drawn == draw(nucleus, ids, 300, streams())[0]


def test_equal_probabilities_are_ordered() -> None:
    """So that the nucleus of a flat distribution has as many candidates as it needs."""
    rows = torch.tensor([[0.25, 0.25, 0.25, 0.25]])
    assert more_probable(rows, torch.tensor([2])).tolist() == [[True, True, False, False]]
    generator = prompt_generator(0, 0)
    drawn = {draw(rows, torch.arange(4)[None], 4, [generator], top_p=0.5)[0][0] for _ in range(200)}
    assert drawn == {0, 1}


def test_a_random_number_of_0_excludes_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda count, generator: torch.zeros(count))
    rows, ids = torch.tensor([[0.0, 1.0, 0.0]]), torch.arange(3)[None]
    assert draw(rows, ids, 3, [prompt_generator(0, 0)], top_p=0.9)[0] == [1]


def test_frequencies_match_the_probabilities() -> None:
    generator = prompt_generator(5, 0)
    count = 20_000

    ids = torch.arange(len(SHARES)).expand(count, -1)

    drawn, _ = draw(torch.tensor([SHARES] * count), ids, len(SHARES), [generator] * count)

    frequencies = torch.bincount(torch.tensor(drawn), minlength=len(SHARES)) / count
    for frequency, share in zip(frequencies.tolist(), SHARES, strict=True):
        # Five standard deviations.
        assert abs(frequency - share) <= 5.0 * math.sqrt(share * (1 - share) / count)


def test_an_id_without_weight_is_never_drawn() -> None:
    rows = torch.tensor([[0.0, 1e-30, 0.0]] * 100)
    ids = torch.tensor([[4, 2, 7]] * 100)
    drawn, _ = draw(rows, ids, 9, [prompt_generator(3, row) for row in range(100)])
    assert drawn == [2] * 100


def test_rounding_and_the_order_of_candidates_change_no_sample() -> None:
    """Of a flat distribution over a large vocabulary, where a cumulative sum would add it up."""
    rows = torch.randn(40, 50_000, generator=prompt_generator(0, 0)) * 0.1
    noise = torch.randn(40, 50_000, generator=prompt_generator(0, 1)) * 1e-7
    for options in ({}, {"top_p": 0.01}, {"top_k": 40}, {"top_k": 0, "top_p": 0.9}):
        params = SamplingParams(**options)
        first, second = (
            choose(each, params, [prompt_generator(5, row) for row in range(40)])
            for each in (rows, rows + noise)
        )
        assert first == second
        assert len(set(first)) > 20


def test_greedy_takes_the_maximum_without_drawing() -> None:
    generator = prompt_generator(1, 0)
    before = generator.get_state()

    assert choose(logits(2), SamplingParams(greedy=True), [generator, generator]) == [1, 1]
    assert torch.equal(generator.get_state(), before)


def test_each_row_draws_once_from_its_own_stream() -> None:
    settings = SamplingParams()
    alone = [choose(logits(), settings, [prompt_generator(7, index)])[0] for index in range(50)]

    together = choose(logits(50), settings, [prompt_generator(7, index) for index in range(50)])

    assert together == alone
    assert len(set(together)) > 1


def test_streams_differ_by_seed_and_index() -> None:
    def stream(seed: int, index: int) -> list[float]:
        return torch.rand(4, generator=prompt_generator(seed, index)).tolist()

    streams = [stream(1, 0), stream(1, 1), stream(2, 0), stream(11, 0), stream(1, 10)]
    assert len({tuple(values) for values in streams}) == len(streams)
    assert stream(1, 0) == streams[0]


def test_parameters_of_sampling_have_no_effect_on_greedy_decoding() -> None:
    plain = choose(logits(), SamplingParams(greedy=True), [])
    options = SamplingParams(greedy=True, top_k=4, top_p=0.1, temperature=9.0)
    assert choose(logits(), options, []) == plain
    assert list(options.problems()) == []


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-40, 1e-30, 1e-5])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_smallest_temperatures_take_the_most_probable_token(
    temperature: float, options: dict[str, Any]
) -> None:
    row = torch.tensor([[90.0, 80.0, 95.0, -torch.inf]])
    params = SamplingParams(temperature=temperature, **options)
    for scale in (1.0, -1.0, 1e30):
        expected = [1] if scale < 0 else [2]
        scaled = torch.cat([row[:, :3] * scale, row[:, 3:]], dim=1)
        assert choose(scaled, params, [prompt_generator(1, 0)]) == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("options", [{"greedy": True}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_only_rows_with_finite_logits_have_a_token(value: float, options: dict[str, Any]) -> None:
    broken = logits(3)
    broken[1, 3] = value
    generators = [prompt_generator(1, index) for index in range(3)]
    first, second, third = choose(broken, SamplingParams(**options), generators)
    assert second is None
    assert first is not None
    assert third is not None


def test_all_problems_are_reported_at_once() -> None:
    assert len(list(SamplingParams(-1.0, -1, 2.0, seed=-1).problems())) == 4
    assert list(SamplingParams().problems()) == []
    assert list(SamplingParams(greedy=True).problems()) == []
