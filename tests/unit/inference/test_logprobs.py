"""Log-probabilities of texts, against the model's logits of the complete text."""

from __future__ import annotations

import pytest
import torch

from megatron_ds.inference.generate import continue_prompts
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig, Scores
from megatron_ds.model.gpt import GPTModel
from tests.problems import raises_problem
from tests.unit.inference.models import KINDS, VOCAB, model_of

IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79]


def score(model: GPTModel, ids: list[int], top_n: int = 0) -> Scores:
    config = GenerationConfig(0, SamplingParams(), prompt_logprobs=True, top_n=top_n)
    (sequence,) = continue_prompts(model, [ids], config)
    assert sequence.ids == ids
    return sequence.scores


@pytest.mark.parametrize("kind", KINDS)
def test_scores_equal_the_full_forward_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ds.inference.generation.engine.SCORED_TOKENS", 5)
    model = model_of(kind)
    with torch.no_grad():
        expected = model(torch.tensor([IDS]))[0].log_softmax(dim=-1)

    scores = score(model, IDS, top_n=3)

    assert len(scores.logprobs) == len(scores.top) == len(IDS) - 1
    for index, (value, top) in enumerate(zip(scores.logprobs, scores.top, strict=True)):
        assert value == pytest.approx(float(expected[index, IDS[index + 1]]), abs=1e-4)
        values, ids = expected[index].topk(3)
        assert [number for number, _ in top] == ids.tolist()
        assert [number for _, number in top] == pytest.approx(values.tolist(), abs=1e-4)


def test_vocabulary_padding_has_no_probability() -> None:
    scores = score(model_of("learned"), [1, 2], top_n=VOCAB + 6)

    assert len(scores.top[0]) == VOCAB
    assert sum(torch.tensor([value for _, value in scores.top[0]]).exp()) == pytest.approx(1.0)


def test_a_single_token_has_no_score() -> None:
    assert score(model_of("rope"), [5], top_n=2).logprobs == []


def test_logits_that_are_not_finite_are_reported() -> None:
    model = model_of("rope")
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with raises_problem("logits-not-finite"):
        score(model, [1, 2, 3])
