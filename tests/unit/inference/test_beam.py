"""Beam search against exhaustive search, and against a search without a cache."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_ds.inference.generate import generate
from megatron_ds.inference.generation.beam import BeamSearchConfig, Hypothesis, beam_search
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from megatron_ds.model.gpt import GPTModel
from tests.problems import raises_problem
from tests.proofs.cases import rotated, with_proofs
from tests.unit.inference.models import KINDS, VOCAB, model_of, result_of

PROMPT = [3, 1, 4, 1, 5]
SMALL = {"vocab_size": 5, "make_vocab_size_divisible_by": 8}
STOP = 2


def drained(model: GPTModel, prompt: list[int], config: BeamSearchConfig) -> list[Hypothesis]:
    return result_of(beam_search(model, prompt, config))


def logprobs_after(model: GPTModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]))[0, -1].double().log_softmax(dim=-1)


def all_continuations(model: GPTModel, prompt: list[int], length: int) -> list[Hypothesis]:
    """Every text that ends with STOP or at the length, with its total log-probability."""
    found = []
    for size in range(1, length + 1):
        for ids in itertools.product(range(model.config.vocab_size), repeat=size):
            if STOP in ids[:-1] or (size < length and ids[-1] != STOP):
                continue
            score = sum(
                float(logprobs_after(model, [*prompt, *ids[:index]])[token])
                for index, token in enumerate(ids)
            )
            found.append(Hypothesis(list(ids), score))
    return sorted(found, key=lambda text: -text.score)


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [text.ids for text in found] == [text.ids for text in expected]
    assert [text.score for text in found] == pytest.approx([e.score for e in expected], abs=1e-4)


def test_a_wide_beam_equals_exhaustive_search() -> None:
    """Claim (serving): wide beam search equals exhaustive search"""
    model = model_of("rope", **SMALL)
    # Wide enough to keep every prefix: 5 tokens have 125 texts of length 3.
    config = BeamSearchConfig(max_new_tokens=3, width=125, stop_token=STOP, length_penalty=0.0)

    found = drained(model, [1, 4], config)

    assert_same(found, all_continuations(model, [1, 4], 3))
    assert {len(text.ids) for text in found} == {1, 2, 3}


def reference(model: GPTModel, prompt: list[int], config: BeamSearchConfig) -> list[Hypothesis]:
    """The rules of Megatron's beam search, applied to complete texts."""
    width = config.width
    stop = config.stop_token
    penalty = config.length_penalty
    beams = [([], 0.0)]
    ended = list[Hypothesis]()
    for _ in range(config.max_new_tokens):
        grown = [
            ([*ids, token], total + value)
            for ids, total in beams
            for token, value in enumerate(logprobs_after(model, [*prompt, *ids]).tolist())
        ]
        grown = sorted(grown, key=lambda beam: -beam[1])[: 2 * width]
        for ids, total in grown[:width]:
            if ids[-1] == stop:
                ended.append(Hypothesis(ids, total / len(ids) ** penalty))
        ended = sorted(ended, key=lambda text: -text.score)[:width]
        beams = [(ids, total) for ids, total in grown if ids[-1] != stop][:width]
        best_open = max(total / len(ids) ** penalty for ids, total in beams)
        if len(ended) == width and ended[-1].score >= best_open:
            return ended
    ended += [Hypothesis(ids, total / len(ids) ** penalty) for ids, total in beams]
    return sorted(ended, key=lambda text: -text.score)[:width]


@pytest.mark.parametrize(("kind", "penalty"), with_proofs(*rotated(KINDS, (1.0, 0.3))))
def test_the_cache_follows_the_beams(kind: str, penalty: float) -> None:
    model = model_of(kind)
    # This token ends some of the beams.
    stop = int(logprobs_after(model, PROMPT).topk(3).indices[-1])

    config = BeamSearchConfig(8, width=3, stop_token=stop, length_penalty=penalty)
    found = drained(model, PROMPT, config)

    assert_same(found, reference(model, PROMPT, config))
    stops = frozenset({stop, VOCAB + 1})
    other = BeamSearchConfig(8, 3, VOCAB, length_penalty=penalty, further_stops=stops)
    assert drained(model, PROMPT, other) == found
    # A low penalty favors short texts.
    assert penalty == 1.0 or any(text.ids[-1] == stop for text in found)


def test_one_beam_is_greedy() -> None:
    model = model_of("learned")
    (expected,) = generate(model, [PROMPT], GenerationConfig(10, SamplingParams(greedy=True)))

    (found,) = drained(model, PROMPT, BeamSearchConfig(10, width=1, stop_token=VOCAB - 1))

    assert found.ids == expected


def test_forbidden_tokens_are_in_no_beam() -> None:
    model = model_of("learned")
    config = BeamSearchConfig(6, width=1, stop_token=VOCAB - 1)
    (free,) = drained(model, PROMPT, config)
    rules = SimpleNamespace(forbidden=lambda previous: free.ids[:1])
    config = dataclasses.replace(config, width=4, rules=rules)

    found = drained(model, PROMPT, config)

    assert all(free.ids[0] not in text.ids for text in found)


def test_logits_that_are_not_finite_are_reported() -> None:
    model = model_of("rope")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with raises_problem("logits-not-finite"):
        drained(model, [1, 2], BeamSearchConfig(3, 2, 0))
