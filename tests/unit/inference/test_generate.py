"""Ids in, ids out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ds.inference.generate import Cancelled, generate
from megatron_ds.inference.sampling_params import SamplingParams
from megatron_ds.model.gpt import GPTModel
from tests.unit.inference.models import EOD, KINDS, VOCAB, model_of

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [EOD], [5, 3, 5], [8, 9, 7], [11, 12, 13, 14, 15]]
GREEDY = SamplingParams(greedy=True)


def by_hand(model: GPTModel, prompt: list[int], new: int, eod: int | None) -> list[int]:
    """The most probable token after all tokens so far, one after the other."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + new and (len(ids) == len(prompt) or ids[-1] != eod):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_argmax_of_the_whole_text_with_and_without_cache(kind: str) -> None:
    model = model_of(kind).eval()
    expected = [by_hand(model, prompt, 24, None) for prompt in PROMPTS]
    assert len({token for ids in expected for token in ids}) > 10

    for cache in (True, False):
        got = generate(model, PROMPTS, max_new_tokens=24, sampling=GREEDY, eod=None, cache=cache)
        assert got == expected


@pytest.mark.parametrize("kind", ["learned", "rope-gqa"])
@pytest.mark.parametrize(
    "settings", [GREEDY, SamplingParams(), SamplingParams(False, 0.8, 20, 0.9, seed=3)]
)
def test_a_prompt_gets_the_same_text_alone(kind: str, settings: SamplingParams) -> None:
    model = model_of(kind)
    options: dict[str, Any] = {"max_new_tokens": 20, "sampling": settings, "eod": EOD}

    together = generate(model, PROMPTS, first_index=4, **options)

    for index, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], first_index=4 + index, **options) == [together[index]]


def test_samples_depend_on_seed_and_number() -> None:
    model = model_of("learned")

    def sample(seed: int, first: int = 0) -> list[list[int]]:
        settings = SamplingParams(seed=seed)
        return generate(
            model, [[7], [7]], max_new_tokens=10, sampling=settings, eod=None, first_index=first
        )

    first, second = sample(1)
    assert first != second
    assert sample(1) == [first, second]
    assert sample(1, first=1)[0] == second
    assert sample(2)[0] != first


def test_a_text_ends_with_the_end_of_document() -> None:
    model = model_of("learned").eval()
    free = [by_hand(model, prompt, 24, None) for prompt in PROMPTS]
    # The end is a token that some texts reach, at different places, and others do not.
    end = free[0][5]
    expected = [by_hand(model, prompt, 24, end) for prompt in PROMPTS]
    assert len({len(ids) for ids in expected}) > 1

    for cache in (True, False):
        got = generate(model, PROMPTS, max_new_tokens=24, sampling=GREEDY, eod=end, cache=cache)
        assert got == expected
    assert got[0][-1] == end
    assert end not in got[0][:-1]


def test_an_end_inside_the_prompt_ends_nothing() -> None:
    model = model_of("learned").eval()
    # The second one is still being fed when the first one's tokens are chosen.
    prompts = [[4], [4, 3, EOD]]
    expected = [by_hand(model, prompt, 5, None) for prompt in prompts]
    assert all(EOD not in ids for ids in expected)

    got = generate(model, prompts, max_new_tokens=5, sampling=GREEDY, eod=EOD)

    assert got == expected


def test_lengths_end_where_they_are_told() -> None:
    model = model_of("learned").eval()
    expected = [by_hand(model, prompt, 10, None) for prompt in PROMPTS]

    got = generate(model, PROMPTS, max_new_tokens=10, max_length=12, sampling=GREEDY, eod=None)

    assert [len(ids) for ids in got] == [4, 10, 9, 9, 7]
    for ids, longer in zip(got, expected, strict=True):
        assert ids == longer[: len(ids)]


def test_learned_positions_can_be_filled_to_the_last() -> None:
    model = model_of("learned")
    got = generate(model, [[1, 2, 3]], max_new_tokens=37, sampling=GREEDY, eod=None)
    assert len(got[0]) == 37


@pytest.mark.parametrize("kind", ["rope", "alibi", "none"])
def test_other_positions_go_on_beyond_the_training(kind: str) -> None:
    model = model_of(kind).eval()

    got = generate(model, [[1, 2, 3]], max_new_tokens=50, sampling=GREEDY, eod=None)

    assert got == [by_hand(model, [1, 2, 3], 50, None)]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    model = model_of("learned")
    settings = SamplingParams(temperature=100.0)

    got = generate(model, [[1]] * 8, max_new_tokens=39, sampling=settings, eod=None)

    tokens = {token for ids in got for token in ids}
    assert max(tokens) < VOCAB
    assert len(tokens) > 0.8 * VOCAB


@pytest.mark.parametrize("training", [True, False])
def test_the_model_stays_in_its_mode(training: bool) -> None:
    model = model_of("learned").train(training)
    generate(model, [[1]], max_new_tokens=2, sampling=GREEDY, eod=None)
    assert model.training is training
    assert model.layers.training is training


def test_training_goes_on_after_a_generation() -> None:
    model = model_of("alibi").train()
    generate(model, [[1, 2, 3]], max_new_tokens=1, sampling=GREEDY, eod=None)
    tokens = torch.tensor([[1, 2, 3]])

    model(tokens, tokens).loss_sum.backward()

    assert all(param.grad is not None for param in model.parameters())


def test_the_cache_feeds_no_token_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("learned")
    fed: list[tuple[int, ...]] = []
    forward = model.forward

    def spy(tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        fed.append(tuple(tokens.shape))
        return forward(tokens, *args, **options)

    monkeypatch.setattr(model, "forward", spy)
    generate(model, [[1, 2, 3], [4] * 9], max_new_tokens=4, sampling=GREEDY, eod=None)

    # The short prompt ends before the long one begins, whose remainder is then fed at once.
    assert fed == [(2, 3), (2, 1), (2, 1), (2, 1), (1, 3), (1, 1), (1, 1), (1, 1)]


def test_no_prompts_give_no_texts() -> None:
    assert generate(model_of("none"), [], max_new_tokens=3, sampling=GREEDY, eod=None) == []


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[1], []], {}, ["prompt 2 has no tokens"]),
        ([[1, VOCAB]], {}, ["prompt 1: id 90 is outside the vocabulary of 90"]),
        ([[-1]], {}, ["prompt 1: id -1 is outside"]),
        ([[1]], {"max_new_tokens": 0}, ["0 new tokens: must be positive"]),
        (
            [[1] * 33, [1] * 32],
            {"max_new_tokens": 8},
            ["prompt 1: 33 tokens and 8 new ones exceed the model's 40 learned positions"],
        ),
        (
            [[1] * 12],
            {"max_length": 12},
            ["prompt 1: its 12 tokens leave no room for new ones in the sequence of 12"],
        ),
        (
            [[], [VOCAB]],
            {"sampling": SamplingParams(top_p=2.0)},
            ["prompt 1", "prompt 2", "--top-p"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_start(
    prompts: list[list[int]],
    options: dict[str, Any],
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("learned")
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("the model was run"))
    chosen = {"max_new_tokens": 3, "sampling": GREEDY, "eod": EOD, **options}

    with pytest.raises(ValueError) as error:
        generate(model, prompts, **chosen)

    lines = str(error.value).splitlines()
    assert len(lines) == len(words)
    for line, start in zip(lines, words, strict=True):
        assert line.startswith(start)


class Ends:
    """Rules: a text ends when the second of these follows the first; nothing follows `last`."""

    def __init__(self, pair: tuple[int, int], last: int | None = None, never: int = 0) -> None:
        self.pair, self.last, self.never = pair, last, never

    def ends(self, previous: int, new: int) -> bool:
        return (previous, new) == self.pair

    def forbidden(self, previous: int) -> list[int]:
        return [self.never] if previous == self.last else []


def test_rules_end_a_text_and_forbid_tokens() -> None:
    model = model_of("learned").eval()
    free = by_hand(model, PROMPTS[0], 12, None)
    options: dict[str, Any] = {"max_new_tokens": 12, "sampling": GREEDY, "eod": None}

    (ended,) = generate(model, PROMPTS[:1], rules=Ends((free[4], free[5])), **options)
    # The prompt's last token is a previous one, too.
    (first,) = generate(model, PROMPTS[:1], rules=Ends((PROMPTS[0][-1], free[0])), **options)
    (other,) = generate(
        model, PROMPTS[:1], rules=Ends((-1, -1), last=PROMPTS[0][-1], never=free[0]), **options
    )

    assert ended == free[:6]
    assert first == free[:1]
    with torch.no_grad():
        second = model(torch.tensor([PROMPTS[0]]))[0, -1].topk(2).indices[1]
    assert other[0] == int(second)


def test_a_decaying_top_p_ends_as_the_most_probable_token() -> None:
    model = model_of("learned").eval()
    decaying = SamplingParams(temperature=4.0, top_p=0.9, top_p_decay=0.5, seed=3)
    bounded = SamplingParams(temperature=4.0, top_p=0.9, top_p_decay=0.5, top_p_bound=0.9, seed=3)
    steady = SamplingParams(temperature=4.0, top_p=0.9, seed=3)
    options: dict[str, Any] = {"max_new_tokens": 24, "eod": None}

    texts = generate(model, PROMPTS, sampling=decaying, **options)

    assert generate(model, PROMPTS, sampling=bounded, **options) == generate(
        model, PROMPTS, sampling=steady, **options
    )
    for prompt, text in zip(PROMPTS, texts, strict=True):
        assert text != by_hand(model, prompt, 24, None)
        assert text[12:] == by_hand(model, [*prompt, *text[:12]], 12, None)
        assert generate(model, [prompt], sampling=decaying, first_index=PROMPTS.index(prompt),
                        **options) == [text]  # fmt: skip


def test_top_p_never_decays_to_off() -> None:
    assert 0.0 < SamplingParams(top_p=0.1, top_p_decay=0.1).after(5000).top_p < 1e-300
    assert SamplingParams(top_p=0.8, top_p_decay=0.5).after(2).top_p == pytest.approx(0.2)
    assert SamplingParams(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3).after(9).top_p == 0.3
    assert SamplingParams(top_p=0.8).after(9).top_p == 0.8


def test_it_can_be_cancelled_between_tokens() -> None:
    asked: list[bool] = []

    def go_on() -> bool:
        asked.append(True)
        return len(asked) < 4

    with pytest.raises(Cancelled):
        generate(model_of("rope"), [[1]], max_new_tokens=9, sampling=GREEDY, eod=None, go_on=go_on)
    assert len(asked) == 4
