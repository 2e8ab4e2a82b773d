"""Continuous batching: a sequence's text does not depend on the others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ds.inference.generate import continue_prompts
from megatron_ds.inference.generation import engine as engine_module
from megatron_ds.inference.generation import kv_cache
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.kv_cache import PreallocatedCache
from megatron_ds.inference.generation.packed_weights import pack_weights
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig, TextSequence
from megatron_ds.model.attention import cores as attention_cores
from megatron_ds.parallel import embedding
from tests.proofs.cases import with_proofs
from tests.unit.inference.models import EOD, KINDS, VOCAB, model_of

GREEDY = SamplingParams(greedy=True)
SHARED = [7, 8, 9, 10, 11]


def config(new: int, **sampling: Any) -> GenerationConfig:
    params = SamplingParams(**sampling) if sampling else GREEDY
    return GenerationConfig(new, params, EOD, logprobs=True, top_n=2)


REQUESTS: list[tuple[list[int], GenerationConfig]] = [
    ([3, 1, 4, 1, 5, 9, 2, 6], config(20)),
    ([5], config(3, temperature=2.0, seed=4)),
    ([*SHARED, 12], config(9, top_k=4)),
    ([*SHARED, 12], config(12, top_p=0.8, seed=5)),
    ([*SHARED, 13, 14], config(1)),
    (list(range(20, 41)), config(15, temperature=0.7)),
    ([8, 9, 7], GenerationConfig(0, GREEDY, prompt_logprobs=True, top_n=1)),
    ([*SHARED, 12, 2], config(20)),
    (list(range(30)), GenerationConfig(5, GREEDY, logprobs=True, prompt_logprobs=True)),
]


@pytest.mark.parametrize(
    ("position", "dtype", "on_host"),
    with_proofs(
        [
            ("rope-gqa", torch.float32, True),
            ("alibi", torch.bfloat16, True),
            ("rope-gqa", torch.float32, False),
            ("alibi", torch.float32, False),
        ],
        [("rope-gqa", torch.float32, True), ("alibi", torch.float32, False)],
    ),
)
def test_a_window_keeps_its_keys_only(
    position: str, dtype: torch.dtype, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts that are fed in parts, share prefixes, and join a batch of longer ones.

    Claim (serving): layers with a window keep the keys and values of the window only, rounded up to
    64 tokens, and give the texts and log-probabilities that all keys give
    """
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 50)
    monkeypatch.setattr(engine_module, "SCORED_TOKENS", 30)
    for module in (engine_module, kv_cache, attention_cores, embedding):
        monkeypatch.setattr(module, "is_host", lambda kind: on_host)
    model = model_of(position, window_size="69,0", window_attn_skip_freq="2").to(dtype)
    prompt = [(7 * at * at + at) % 80 for at in range(200)]
    scored = GenerationConfig(20, GREEDY, logprobs=True, prompt_logprobs=True)
    requests = [
        *((prompt[:length], config(90)) for length in (200, 5, 66, 130)),
        ([*prompt[:170], 3], config(70)),  # whose shared keys are still there
        ([*prompt[:40], *[4] * 20], config(150, top_k=3)),  # and here no longer
        (prompt[50:190], scored),
    ]
    ring = PreallocatedCache.ring
    results = []
    sizes = []
    for keeps_all in (False, True):
        keep = (lambda cache, window: cache._capacity) if keeps_all else ring
        monkeypatch.setattr(PreallocatedCache, "ring", keep)
        engine = GenerationEngine(model, slots=3, capacity=300)
        sequences = [TextSequence.of(*each, index) for index, each in enumerate(requests)]
        for sequence in sequences:
            engine.add(sequence)
            for _ in range(9):
                engine.step()
        while engine.is_busy:
            engine.step()
        results.append([(each.ids, each.scores.logprobs) for each in sequences])
        of_layers = engine._cache._buffers
        sizes.append([sum(part.nbytes for part in of_layers[layer]) for layer in (0, 1)])
    of_token = 3 * 2 * model.config.kv_heads * 8 * 4
    assert sizes == [[128 * of_token, 320 * of_token], [320 * of_token] * 2]
    for (ids, logprobs), (all_ids, all_logprobs) in zip(*results, strict=True):
        assert ids == all_ids
        assert logprobs == pytest.approx(all_logprobs, abs=1e-5)


def top_ids(sequence: TextSequence) -> list[list[int]]:
    return [[number for number, _ in each] for each in sequence.scores.top]


BATCHES = [(kind, slots) for kind in KINDS for slots in (2, 4, 9)]
ONE_SIZE = ("learned", "alibi", "none", "rope-gqa")
"""Kinds that `make test` tries with four slots only."""


@pytest.mark.parametrize(
    ("kind", "slots"),
    with_proofs(BATCHES, [each for each in BATCHES if each[0] in ONE_SIZE and each[1] != 4]),
)
def test_sequences_join_and_leave_a_batch(
    kind: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): a sequence that joins or leaves a batch has the text and log-probabilities
    that it has alone, with any positions and settings"""
    # Prompts are fed in parts, those that are scored in others, and two of them share a prefix.
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(engine_module, "SCORED_TOKENS", 5)
    monkeypatch.setattr(engine_module, "MIN_SHARED_TOKENS", 3)
    model = model_of(kind)
    copies: list[int] = []
    engine = GenerationEngine(model, slots=slots, capacity=40)
    copy = engine._cache.copy
    monkeypatch.setattr(
        engine._cache,
        "copy",
        lambda source, target, length=None: (
            copies.append(length) if length else None,
            copy(source, target, length),
        ),
    )
    sequences = [TextSequence.of(prompt, each, index=1) for prompt, each in REQUESTS]
    late = iter(sequences)
    for sequence in (next(late), next(late), next(late)):
        engine.add(sequence)
    ended: list[TextSequence] = []
    while engine.is_busy:
        assert len(engine.running) <= slots
        ended += [each for each in engine.step() if each.is_done]
        if (sequence := next(late, None)) is not None:
            engine.add(sequence)

    assert sorted(map(id, ended)) == sorted(map(id, sequences))
    assert copies or slots == 2
    for (prompt, each), sequence in zip(REQUESTS, sequences, strict=True):
        (alone,) = continue_prompts(model, [prompt], each, indexes=[1])
        assert sequence.ids == alone.ids
        assert sequence.scores.logprobs == pytest.approx(alone.scores.logprobs, abs=1e-4)
        assert top_ids(sequence) == top_ids(alone)


MANY_TOKENS = [(kind, 6, 50) for kind in ("rope", "alibi", "learned-gqa")]


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="a CPU without kernels for bf16"
)
@pytest.mark.parametrize(
    ("kind", "count", "new"),
    with_proofs(
        [*MANY_TOKENS, ("alibi", 3, 25), ("learned-gqa", 3, 25)], [*MANY_TOKENS, ("alibi", 3, 25)]
    ),
)
def test_half_precision_has_the_texts_of_single_requests(
    kind: str, count: int, new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their log-probabilities, to the last bit."""
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 64)
    monkeypatch.setattr(attention_cores, "SCORES_AT_ONCE", 2**12)
    shape = {"seq_length": 200, "hidden_size": 256, "ffn_hidden_size": 3072}
    model = model_of(kind, **shape, init_method_std=0.05)
    model = model.to(torch.bfloat16)
    pack_weights(model)
    draw = random.Random(1)
    prompts = []
    for _ in range(count):
        prompt = draw.choices(range(EOD), k=draw.randint(1, 90))
        # Of the last one, a token is left to be fed.
        prompts += [prompt, [*prompt[: len(prompt) * 2 // 3], 7], [*prompt, 7]]
    engine = GenerationEngine(model, slots=5, capacity=150)
    sequences = [TextSequence.of(prompt, config(new), 0) for prompt in prompts]
    for sequence in sequences:
        engine.add(sequence)
        engine.step()
    while engine.is_busy:
        engine.step()
    alone = [continue_prompts(model, [prompt], config(new))[0] for prompt in prompts]
    pairs = list(zip(sequences, alone, strict=True))
    assert all(one.ids == other.ids for one, other in pairs)
    equal = [one.scores == other.scores for one, other in pairs]
    assert sum(equal) >= 0.9 * len(equal), equal  # all, with the processors tried


@pytest.mark.parametrize("is_trained", [True, False])
def test_removed_sequences_free_their_slots(is_trained: bool) -> None:
    model = model_of("rope").requires_grad_(is_trained)
    engine = GenerationEngine(model, slots=2, capacity=30)
    sequences = [TextSequence.of([number], config(20), index=0) for number in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    engine.step()
    engine.remove([sequences[0], sequences[2]])
    engine.step()

    assert engine.running == [sequences[1], sequences[3]]
    while engine.is_busy:
        engine.step()
    for sequence in (sequences[1], sequences[3]):
        (alone,) = continue_prompts(model, [sequence.ids[:1]], config(20))
        assert sequence.ids == alone.ids


def test_a_trained_model_can_be_trained_after_generation() -> None:
    """Its tables of positions are those that generation has made."""
    model = model_of("rope")
    continue_prompts(model, [[1, 2, 3]], config(5))
    model(torch.arange(8).view(1, 8)).sum().backward()
    assert all(each.grad is not None for each in model.parameters())


def test_a_prompt_can_be_removed_while_it_is_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PROMPT_TOKENS", 4)
    engine = GenerationEngine(model_of("rope"), slots=1, capacity=40)
    long = TextSequence.of(list(range(30)), config(5), index=0)
    engine.add(long)
    engine.step()
    assert engine.is_busy
    assert not engine.running
    engine.remove([long])
    assert not engine.is_busy


def test_a_sequence_whose_logits_are_not_finite_harms_no_other() -> None:
    model = model_of("learned")
    with torch.no_grad():
        model.embedding.word.weight[VOCAB - 5] = torch.nan
    engine = GenerationEngine(model, slots=2, capacity=30)
    broken = TextSequence.of([1, VOCAB - 5, 2, 3, 4, 5, 6], config(3), index=0)
    good = TextSequence.of([4, 5], GenerationConfig(9, GREEDY), index=0)
    after = TextSequence.of([6], GenerationConfig(9, GREEDY), index=0)
    # The tied output layer makes logits of that token NaN in all texts: exclude it.
    head = model.logits

    def logits(x_SBH: torch.Tensor) -> torch.Tensor:
        logits_BSV = head(x_SBH)
        logits_BSV[..., VOCAB - 5] = -torch.inf
        return logits_BSV

    model.logits = logits  # type: ignore[method-assign]
    for sequence in (good, broken, after):
        engine.add(sequence)
    while engine.is_busy:
        engine.step()

    assert broken.error is not None
    assert broken.error.problems[0].code == "logits-not-finite"
    for sequence in (good, after):
        prompt = sequence.ids[: sequence.prompt_length]
        (alone,) = continue_prompts(model, [prompt], sequence.config)
        assert sequence.ids == alone.ids


def test_generation_on_devices_leaves_out_kernels_with_a_plan_per_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Training, whose sizes stay the same, has all of them."""
    switch = torch.backends.cuda
    seen: set[bool] = set()
    attend = F.scaled_dot_product_attention

    def observed(*args: Any, **options: Any) -> torch.Tensor:
        seen.add(switch.cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", observed)
    monkeypatch.setattr(attention_cores, "is_host", lambda kind: False)
    model = model_of("rope")
    continue_prompts(model, [[1, 2, 3], [4]], config(3))
    assert seen == {False}
    seen.clear()
    model(torch.zeros((1, 40), dtype=torch.int64))
    assert seen == {True}
