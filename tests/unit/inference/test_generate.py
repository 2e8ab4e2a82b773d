"""Token generation on small models."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_ds.config.problems import UserError
from megatron_ds.inference.generate import Cancelled, generate
from megatron_ds.inference.generation.kv_cache import FILLED_TOKENS, PreallocatedCache
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from megatron_ds.model.gpt import GPTModel
from tests.problems import codes
from tests.unit.inference.models import EOD, KINDS, VOCAB, model_of

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [EOD], [5, 3, 5], [8, 9, 7], [11, 12, 13, 14, 15]]
GREEDY = SamplingParams(greedy=True)


def reference(model: GPTModel, prompt: list[int], new: int, eod: int | None = None) -> list[int]:
    """Greedy decoding that recomputes all tokens for each new one."""
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + new and (len(ids) == len(prompt) or ids[-1] != eod):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_with_and_without_cache(kind: str) -> None:
    """Claim (serving): generation with a key-value cache equals generation without"""
    model = model_of(kind)
    expected = [reference(model, prompt, 24) for prompt in PROMPTS]
    assert len({token for ids in expected for token in ids}) > 10

    for use_cache in (True, False):
        config = GenerationConfig(24, GREEDY, use_cache=use_cache)
        assert generate(model, PROMPTS, config) == expected


@pytest.mark.parametrize("kind", ["learned", "rope-gqa"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(0.8, 20, 0.9, seed=3)])
def test_a_text_does_not_depend_on_its_batch(kind: str, params: SamplingParams) -> None:
    model = model_of(kind)
    config = GenerationConfig(20, params, EOD)

    together = generate(model, PROMPTS, config, indexes=range(4, 4 + len(PROMPTS)))

    for index, prompt in enumerate(PROMPTS):
        assert generate(model, [prompt], config, indexes=[4 + index]) == [together[index]]


def test_the_end_of_document_ends_a_text() -> None:
    model = model_of("learned")
    free = [reference(model, prompt, 24) for prompt in PROMPTS]
    # Some texts reach this token, at different positions, and others do not.
    end = free[0][5]
    expected = [reference(model, prompt, 24, end) for prompt in PROMPTS]
    assert len({len(ids) for ids in expected}) > 1

    for use_cache in (True, False):
        for ends in ({"eod": end}, {"eod": VOCAB, "further_ends": frozenset({end, VOCAB + 1})}):
            config = GenerationConfig(24, GREEDY, use_cache=use_cache, **ends)
            assert generate(model, PROMPTS, config) == expected
    assert expected[0].index(end) == len(expected[0]) - 1


def test_an_end_of_document_in_the_prompt_is_ignored() -> None:
    model = model_of("learned")
    # The second prompt is still being fed when tokens of the first one are chosen.
    prompts = [[4], [4, 3, EOD]]
    expected = [reference(model, prompt, 5) for prompt in prompts]
    assert all(EOD not in ids for ids in expected)

    assert generate(model, prompts, GenerationConfig(5, GREEDY, EOD)) == expected


def test_texts_end_at_the_maximal_length() -> None:
    model = model_of("learned")
    expected = [reference(model, prompt, 10) for prompt in PROMPTS]

    found = generate(model, PROMPTS, GenerationConfig(10, GREEDY, max_length=12))

    lengths = [4, 10, 9, 9, 7]
    assert found == [ids[:length] for ids, length in zip(expected, lengths, strict=True)]


@pytest.mark.parametrize(
    ("kind", "new"), [("learned", 37), ("rope", 50), ("alibi", 50), ("none", 50)]
)
def test_only_learned_positions_limit_the_length(kind: str, new: int) -> None:
    model = model_of(kind)

    (found,) = generate(model, [[1, 2, 3]], GenerationConfig(new, GREEDY))
    assert found == reference(model, [1, 2, 3], new)
    assert len(found) == new


def test_vocabulary_padding_is_never_sampled() -> None:
    model = model_of("learned")
    config = GenerationConfig(39, SamplingParams(temperature=100.0))

    tokens = {token for ids in generate(model, [[1]] * 8, config) for token in ids}

    assert max(tokens) < VOCAB
    assert len(tokens) > 0.8 * VOCAB


def test_no_token_is_fed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("learned")
    fed: list[tuple[int, ...]] = []
    forward = model.forward

    def spy(tokens: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if options["compute"] == model._hidden:
            fed.append(tuple(tokens.shape))
        return forward(tokens, *args, **options)

    monkeypatch.setattr(model, "forward", spy)
    generate(model, [[1, 2, 3], [4] * 9], GenerationConfig(4, GREEDY))

    # The prompts but for their last tokens in one pass, and then a token of each text at a time.
    assert fed == [(2, 8), (2, 1), (2, 1), (2, 1), (2, 1)]
    del fed[:]
    generate(model, [[1, 2]], GenerationConfig(2, GREEDY))
    assert fed == [(1, 2), (1, 1), (1, 1)]  # a prompt's pass has at least two tokens


def test_memory_of_keys_and_values_is_allocated_once() -> None:
    cache = PreallocatedCache(2, 10, torch.empty(0))
    part = torch.ones(2, 3, 1, 4)
    kept = [tensor for _ in range(10) for tensor in cache.view(0, [1, 1]).update(0, part, part)]
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == 2


def test_layers_keep_keys_and_values_of_their_own_sizes() -> None:
    cache = PreallocatedCache(2, 10, torch.empty(0))
    drawn = torch.Generator().manual_seed(0)
    shapes = {0: ((2, 3, 4), (2, 3, 6)), 1: ((2, 1, 8), (2, 1, 2))}  # texts, heads, head size
    new = {
        layer: [torch.randn(*shape[:2], 5, shape[2], generator=drawn) for shape in both]
        for layer, both in shapes.items()
    }
    for start, end in ((0, 3), (3, 5)):
        view = cache.view(0, [end - start] * 2)
        for layer, parts in new.items():
            stored = view.update(layer, *(part[:, :, start:end] for part in parts))
            for kept, part in zip(stored, parts, strict=True):
                assert torch.equal(kept, part[:, :, :end])


def test_texts_beside_longer_ones_see_no_memory_that_was_never_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a text does not have is finite, also where a longer one grows by many tokens."""

    def filled_with_nan(like: torch.Tensor, shape: Any, **options: Any) -> torch.Tensor:
        return like.new_full(shape, float("nan"), **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", filled_with_nan)
    model = model_of("rope")
    prompts = [[1, 2], list(range(1, 11))]
    config = GenerationConfig(2 * FILLED_TOKENS, GREEDY)
    together = generate(model, prompts, config)
    assert together == [generate(model, [prompt], config)[0] for prompt in prompts]


def test_no_prompts_give_no_texts() -> None:
    assert generate(model_of("none"), [], GenerationConfig(3, GREEDY)) == []


@pytest.mark.parametrize(
    ("prompts", "config", "expected"),
    [
        ([[1], []], GenerationConfig(3, GREEDY), "prompt-without-tokens"),
        ([[1, VOCAB], [-1]], GenerationConfig(3, GREEDY), "prompt-id-out-of-range " * 2),
        ([[1]], GenerationConfig(0, GREEDY), "no-new-tokens"),
        ([[1] * 33, [1] * 32], GenerationConfig(8, GREEDY), "prompt-exceeds-learned-positions"),
        ([[1] * 12], GenerationConfig(3, GREEDY, max_length=12), "prompt-fills-sequence"),
        (
            [[], [VOCAB]],
            GenerationConfig(3, SamplingParams(top_k=-2)),
            "prompt-without-tokens prompt-id-out-of-range out-of-range",
        ),
    ],
    ids=str,
)
def test_unsuitable_prompts_are_rejected_before_any_computation(
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    config: GenerationConfig,
    expected: str,
) -> None:
    model = model_of("learned")
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("the model was run"))

    with pytest.raises(UserError) as raised:
        generate(model, prompts, config)

    assert codes(raised.value.problems) == expected.split()


@dataclass
class PairRules:
    """Stop rules: a text ends with this pair of tokens; `never` must not follow `last`."""

    pair: tuple[int, int]
    last: int | None = None
    never: int = 0

    def ends(self, previous: int, new: int) -> bool:
        return (previous, new) == self.pair

    def forbidden(self, previous: int) -> list[int]:
        return [self.never] if previous == self.last else []


def test_stop_rules_end_texts_and_forbid_tokens() -> None:
    model = model_of("learned")
    free = reference(model, PROMPTS[0], 12)
    last = PROMPTS[0][-1]

    def generate_with(rules: PairRules) -> list[int]:
        (ids,) = generate(model, PROMPTS[:1], GenerationConfig(12, GREEDY, rules=rules))
        return ids

    assert generate_with(PairRules((free[4], free[5]))) == free[:6]
    # The previous token may belong to the prompt.
    assert generate_with(PairRules((last, free[0]))) == free[:1]
    other = generate_with(PairRules((-1, -1), last=last, never=free[0]))
    with torch.no_grad():
        second = model(torch.tensor([PROMPTS[0]]))[0, -1].topk(2).indices[1]
    assert other[0] == int(second)


def test_a_decaying_top_p_becomes_greedy() -> None:
    model = model_of("learned")
    steady = SamplingParams(temperature=4.0, top_p=0.9, seed=3)
    decaying = dataclasses.replace(steady, top_p_decay=0.5)
    bounded = dataclasses.replace(decaying, top_p_bound=0.9)

    texts, bounded_texts, steady_texts = (
        generate(model, PROMPTS, GenerationConfig(24, params))
        for params in (decaying, bounded, steady)
    )

    assert bounded_texts == steady_texts
    for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        assert text != reference(model, prompt, 24)
        assert text[12:] == reference(model, [*prompt, *text[:12]], 12)
        config = GenerationConfig(24, decaying)
        assert generate(model, [prompt], config, indexes=[index]) == [text]


def test_top_p_never_decays_to_zero() -> None:
    assert 0.0 < SamplingParams(top_p=0.1, top_p_decay=0.1).after(5000).top_p < 1e-300
    assert SamplingParams(top_p=0.8, top_p_decay=0.5).after(2).top_p == pytest.approx(0.2)
    assert SamplingParams(top_p=0.8, top_p_decay=0.5, top_p_bound=0.3).after(9).top_p == 0.3
    assert SamplingParams(top_p=0.8).after(9).top_p == 0.8


def test_generation_can_be_cancelled_between_tokens() -> None:
    calls = itertools.count(1)

    config = GenerationConfig(9, GREEDY)
    with pytest.raises(Cancelled):
        generate(model_of("rope"), [[1]], config, should_continue=lambda: next(calls) < 4)
    assert next(calls) == 5
