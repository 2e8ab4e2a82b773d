"""Beam search against all continuations there are, and against a search without a cache."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_ds.inference.beam import Hypothesis, beam_search
from megatron_ds.inference.generate import Cancelled, generate
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.model.gpt import GPTModel
from tests.unit.inference.models import KINDS, VOCAB, model_of

PROMPT = [3, 1, 4, 1, 5]
SMALL = {"vocab_size": 5, "make_vocab_size_divisible_by": 8}
STOP = 2


def logprobs_after(model: GPTModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]))[0, -1].double().log_softmax(dim=-1)


def all_continuations(model: GPTModel, prompt: list[int], length: int) -> list[Hypothesis]:
    """Every text that ends with STOP or at the length, with the sum of its log-probabilities."""
    found = []
    for size in range(1, length + 1):
        for ids in itertools.product(range(model.config.vocab), repeat=size):
            if STOP in ids[:-1] or (size < length and ids[-1] != STOP):
                continue
            score = sum(
                float(logprobs_after(model, [*prompt, *ids[:place]])[token])
                for place, token in enumerate(ids)
            )
            found.append(Hypothesis(list(ids), score))
    return sorted(found, key=lambda each: -each.score)


def test_a_wide_beam_finds_the_best_of_all_continuations() -> None:
    model = model_of("rope", **SMALL)
    # No prefix is dropped: of 5 tokens, there are 125 of 3.
    got = beam_search(
        model, [1, 4], max_new_tokens=3, width=125, stop_token=STOP, length_penalty=0.0
    )
    expected = all_continuations(model, [1, 4], 3)

    assert [each.ids for each in got] == [each.ids for each in expected]
    assert [each.score for each in got] == pytest.approx([e.score for e in expected], abs=1e-4)
    assert {len(each.ids) for each in got} == {1, 2, 3}


def by_hand(
    model: GPTModel, prompt: list[int], *, new: int, width: int, stop: int, penalty: float
) -> list[Hypothesis]:
    """The rules of Megatron's beam search on whole texts."""
    beams, ended = [([], 0.0)], list[Hypothesis]()
    for _ in range(new):
        grown = [
            ([*ids, token], total + value)
            for ids, total in beams
            for token, value in enumerate(logprobs_after(model, [*prompt, *ids]).tolist())
        ]
        grown = sorted(grown, key=lambda each: -each[1])[: 2 * width]
        for ids, total in grown[:width]:
            if ids[-1] == stop:
                ended.append(Hypothesis(ids, total / len(ids) ** penalty))
        ended = sorted(ended, key=lambda each: -each.score)[:width]
        beams = [(ids, total) for ids, total in grown if ids[-1] != stop][:width]
        best_open = max(total / len(ids) ** penalty for ids, total in beams)
        if len(ended) == width and ended[-1].score >= best_open:
            return ended
    ended += [Hypothesis(ids, total / len(ids) ** penalty) for ids, total in beams]
    return sorted(ended, key=lambda each: -each.score)[:width]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("penalty", [1.0, 0.3])
def test_the_cache_follows_the_beams(kind: str, penalty: float) -> None:
    model = model_of(kind)
    # A token that ends some beams.
    stop = int(logprobs_after(model, PROMPT).topk(3).indices[-1])

    got = beam_search(
        model, PROMPT, max_new_tokens=8, width=3, stop_token=stop, length_penalty=penalty
    )

    expected = by_hand(model, PROMPT, new=8, width=3, stop=stop, penalty=penalty)
    assert [each.ids for each in got] == [each.ids for each in expected]
    assert [each.score for each in got] == pytest.approx([e.score for e in expected], abs=1e-4)
    # A low penalty is kind to short texts.
    assert penalty == 1.0 or any(each.ids[-1] == stop for each in got)


def test_one_beam_is_greedy() -> None:
    model = model_of("learned")
    greedy = SamplingParams(greedy=True)
    (expected,) = generate(model, [PROMPT], max_new_tokens=10, sampling=greedy, eod=None)

    (got,) = beam_search(model, PROMPT, max_new_tokens=10, width=1, stop_token=VOCAB - 1)

    assert got.ids == expected


class Never:
    """Rules: this token follows nothing."""

    def __init__(self, token: int) -> None:
        self.token = token

    def ends(self, previous: int, new: int) -> bool:
        return False

    def forbidden(self, previous: int) -> list[int]:
        return [self.token]


def test_forbidden_tokens_are_in_no_beam() -> None:
    model = model_of("learned")
    (free,) = beam_search(model, PROMPT, max_new_tokens=6, width=1, stop_token=VOCAB - 1)

    got = beam_search(
        model, PROMPT, max_new_tokens=6, width=4, stop_token=VOCAB - 1, rules=Never(free.ids[0])
    )

    assert all(free.ids[0] not in each.ids for each in got)


def test_it_can_be_cancelled() -> None:
    with pytest.raises(Cancelled):
        beam_search(
            model_of("rope"), [1], max_new_tokens=2, width=1, stop_token=0, go_on=lambda: False
        )
