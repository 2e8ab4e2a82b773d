"""Requests to responses, with a small model and a character tokenizer."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import UserError
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.serving.api_schema import Defaults
from megatron_ds.inference.serving.megatron_api import MegatronApi
from megatron_ds.inference.serving.scheduler import Finished
from megatron_ds.inference.serving.service import (
    GenerationJob,
    TextGenerationService,
    max_sequence_length,
)
from megatron_ds.model.gpt import GPTModel
from megatron_ds.tokenizer import Tokenizer
from tests.problems import codes, raises_problem
from tests.unit.inference.models import EOD, VOCAB, model_of, result_of

EOL = 10
TWO_EOLS = 11
COLON = 12
MAX_LENGTH = 40
BEGIN = 88
SPECIAL = {EOL: "\n", TWO_EOLS: "\n\n", COLON: ":", EOD: "<end>"}


class CharTokenizer(Tokenizer):
    """A tokenizer of single characters."""

    vocab_size = VOCAB
    eod = EOD

    def encode(self, text: str) -> list[int]:
        if "?" in text:
            raise ValueError("there is no ?")
        ids = {char: number for number, char in SPECIAL.items() if len(char) == 1}
        return [ids.get(char, ord(char) % VOCAB) for char in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(map(self.encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(SPECIAL.get(number, chr(0x4E00 + number)) for number in ids)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return model_of("rope")


@pytest.fixture
def service(model: GPTModel) -> TextGenerationService:
    return TextGenerationService(model, CharTokenizer(), MAX_LENGTH)


def finish(service: TextGenerationService, job: GenerationJob) -> Finished:
    """The result of a job."""
    started = service.start(job)
    if isinstance(started, list):
        engine = GenerationEngine(service.model, slots=len(started), capacity=MAX_LENGTH)
        for sequence in started:
            engine.add(sequence)
        while engine.is_busy:
            engine.step()
        return Finished(started)
    return Finished(result_of(started))


def read(service: TextGenerationService, fields: Any) -> GenerationJob:
    return MegatronApi(service, Defaults(tokens_to_generate=30)).read(json.dumps(fields).encode())


def respond(service: TextGenerationService, **fields: Any) -> dict[str, Any]:
    job = read(service, fields)
    response = MegatronApi(service, Defaults()).response(job, finish(service, job))
    return json.loads(json.dumps(response, allow_nan=False))


def test_long_prompts_are_rejected_before_they_are_tokenized(
    model: GPTModel, service: TextGenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): prompts that are too long are rejected before they are tokenized, and
    incomplete requests are ended"""
    limit = MAX_LENGTH * 16
    encoded: list[str] = []

    def encode(tokenizer: CharTokenizer, text: str) -> list[int]:
        encoded.append(text)
        return [1] * len(text.replace(" ", ""))

    monkeypatch.setattr(CharTokenizer, "encode", encode)

    def problems(*prompts: str) -> list[str]:
        encoded.clear()
        with pytest.raises(UserError) as raised:
            read(service, {"prompts": prompts})
        return codes(raised.value.problems)

    assert problems("a" * (limit + 1), "b") == ["prompt-has-too-many-characters"]
    assert encoded == []
    assert problems("a" * MAX_LENGTH, "b" * limit, "c") == ["prompt-fills-sequence"]
    assert encoded == ["a" * MAX_LENGTH]
    assert problems("a" * MAX_LENGTH, "b", "c" * 50) == ["prompt-fills-sequence"] * 2
    fits = " " * (limit - 1) + "a"
    assert read(service, {"prompts": [fits, fits]}).prompts == [[1], [1]]
    monkeypatch.setattr(CharTokenizer, "decode", lambda *_: "x" * 17)
    other = TextGenerationService(model, CharTokenizer(), MAX_LENGTH)
    assert read(other, {"prompts": [fits + "  "]})


def test_a_response_contains_prompt_and_continuation(service: TextGenerationService) -> None:
    response = respond(service, prompts=["abc", "d"], tokens_to_generate=5, top_k=1)

    assert set(response) == {"text", "segments", "tokens", "logprobs"}
    assert response["logprobs"] is None
    decode = CharTokenizer().decode
    encode = CharTokenizer().encode
    for prompt, text, segments, tokens in zip(
        ["abc", "d"], response["text"], response["segments"], response["tokens"], strict=True
    ):
        assert (tokens[: len(prompt)], len(tokens)) == (encode(prompt), len(prompt) + 5)
        assert text == decode(tokens) == "".join(segments)
        assert len(segments) == len(tokens)


def test_logprobs_of_every_token_but_the_first(
    service: TextGenerationService, model: GPTModel
) -> None:
    response = respond(
        service, prompts=["abc"], tokens_to_generate=4, logprobs=True, top_n_logprobs=2, top_k=1
    )

    (ids,) = response["tokens"]
    (logprobs,) = response["logprobs"]
    with torch.no_grad():
        expected = model(torch.tensor([ids]))[0].log_softmax(dim=-1)
    assert logprobs == pytest.approx([float(expected[i, ids[i + 1]]) for i in range(6)], abs=1e-4)
    (most_probable,) = response["top_n_logprobs"]
    decode = CharTokenizer().decode
    for found, row in zip(most_probable, expected, strict=False):
        values, numbers = row.topk(2)
        assert list(found) == [decode([number]) for number in numbers.tolist()]
        assert list(found.values()) == pytest.approx(values.tolist(), abs=1e-4)
    # Greedy: the chosen tokens are the most probable ones.
    assert response["logprobs"][0][2:] == [max(top.values()) for top in most_probable[2:]]


def test_zero_new_tokens_score_the_prompts(service: TextGenerationService) -> None:
    response = respond(service, prompts=["abcd", "b"], tokens_to_generate=0, logprobs=True)

    assert response["tokens"] == [CharTokenizer().encode(text) for text in ("abcd", "b")]
    more = respond(service, prompts=["abcd"], tokens_to_generate=1, logprobs=True)
    assert response["logprobs"] == [pytest.approx(more["logprobs"][0][:3]), []]


def test_texts_depend_on_the_seed_and_are_random_without_one(
    service: TextGenerationService,
) -> None:
    fields: dict[str, Any] = {"prompts": ["ab"] * 3, "tokens_to_generate": 8, "temperature": 3}

    first = respond(service, **fields, random_seed=5)

    assert respond(service, **fields, random_seed=5) == first
    assert respond(service, **fields, random_seed=6) != first
    assert len(set(first["text"])) == 3
    assert respond(service, **fields)["text"] != respond(service, **fields)["text"]


def test_texts_without_a_requested_length_fill_the_sequence(service: TextGenerationService) -> None:
    short, long = respond(service, prompts=["a", "a" * 35], temperature=50)["tokens"]

    assert len(short) == 31 or short[-1] == EOD
    assert len(long) == MAX_LENGTH or long[-1] == EOD


@pytest.mark.parametrize(
    ("prompts", "fields", "code", "shown"),
    [
        (
            ["a", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"],
            {"tokens_to_generate": 5},
            "prompt-and-new-tokens-exceed-length",
            "prompt 2: its 36 ",
        ),
        (
            ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"],
            {"tokens_to_generate": 5},
            "prompt-and-new-tokens-exceed-length",
            "by 1 token, or ask for at most 4 new",
        ),
        (
            ["aa"],
            {"tokens_to_generate": 500},
            "prompt-and-new-tokens-exceed-length",
            "length of 40: ask for at most 38 new tokens",
        ),
        (
            ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"],
            {"tokens_to_generate": 50},
            "prompt-and-new-tokens-exceed-length",
            "length of 40: shorten the prompt, and ask for fewer",
        ),
        (
            ["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"],
            {"tokens_to_generate": 0, "logprobs": True},
            "prompt-and-new-tokens-exceed-length",
            "by 1 token",
        ),
        (["aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"], {}, "prompt-fills-sequence", "40"),
        (["a", "?"], {}, "prompt-not-encodable", "prompt 2"),
        (["a"], {"beam_width": 2, "stop_token": 90}, "stop-token-out-of-range", "90"),
    ],
)
def test_unsuitable_requests_are_rejected(
    service: TextGenerationService, prompts: list[str], fields: Any, code: str, shown: str
) -> None:
    with raises_problem(code, contains=shown):
        read(service, {"prompts": prompts, **fields})


def test_the_sequence_can_be_filled(service: TextGenerationService) -> None:
    assert respond(service, prompts=["a", "a" * 36], tokens_to_generate=4)
    assert respond(service, prompts=["a" * 40], tokens_to_generate=0, logprobs=True)


def test_add_bos_starts_with_the_end_of_document(service: TextGenerationService) -> None:
    fields = {"tokens_to_generate": 2, "top_k": 1}  # an end of document could be drawn otherwise
    response = respond(service, prompts=["", "b"], add_BOS=True, **fields)
    assert [ids[:-2] for ids in response["tokens"]] == [[EOD], [EOD, ord("b") % VOCAB]]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("add_bos", [False, True])
def test_texts_begin_with_the_begin_token_of_the_tokenizer(
    service: TextGenerationService, adds_bos: bool, add_bos: bool
) -> None:
    """Unless they do already; a response has the text without what was added."""
    tokenizer = CharTokenizer()
    tokenizer.bos = BEGIN
    tokenizer.adds_bos = adds_bos
    begun = dataclasses.replace(service, tokenizer=tokenizer)
    fields = {"tokens_to_generate": 1, "top_k": 1, "add_BOS": add_bos}
    response = respond(begun, prompts=["b", chr(BEGIN) + "b"], **fields)
    first = [BEGIN] * (adds_bos or add_bos)
    b = ord("b") % VOCAB
    assert [ids[:-1] for ids in response["tokens"]] == [[*first, b], [BEGIN, b]]
    hidden = "" if adds_bos else chr(0x4E00 + BEGIN)
    expected = [hidden * len(first) + chr(0x4E00 + b), hidden + chr(0x4E00 + b)]
    assert [text[:-1] for text in response["text"]] == expected


def test_beam_search_returns_texts_and_scores(service: TextGenerationService) -> None:
    response = respond(service, prompts=["abc"], tokens_to_generate=5, beam_width=3)

    assert set(response) == {"text", "segments", "tokens", "scores"}
    assert len(response["text"]) == len(response["scores"]) == 3
    assert response["scores"] == sorted(response["scores"], reverse=True)
    prompt = CharTokenizer().decode(CharTokenizer().encode("abc"))
    assert all(text.startswith(prompt) for text in response["text"])


def texts(service: TextGenerationService, **fields: Any) -> list[list[int]]:
    """New tokens of many samples; at this temperature nearly any token occurs."""
    prompt = fields.pop("prompt", "a")
    fields |= {"tokens_to_generate": 36, "temperature": 100, "random_seed": 1}
    response = respond(service, prompts=[prompt] * 128, **fields)
    return [ids[len(CharTokenizer().encode(prompt)) :] for ids in response["tokens"]]


def test_a_newline_ends_texts(service: TextGenerationService) -> None:
    ended = [ids for ids in texts(service, stop_on_eol=True) if len(ids) < 36]
    assert {ids[-1] for ids in ended} == {EOL, TWO_EOLS, EOD}
    assert not any({EOL, TWO_EOLS} & set(ids[:-1]) for ids in ended)


def test_an_empty_line_ends_texts(service: TextGenerationService) -> None:
    # The prompt ends with a newline: a second one makes an empty line.
    samples = texts(service, stop_on_double_eol=True, prompt="a\n")
    assert all(TWO_EOLS not in ids[:-1] for ids in samples)
    assert any(EOL in ids[1:-1] for ids in samples)
    assert any(ids == [EOL] for ids in samples) == any(ids[0] == EOL for ids in samples)
    pairs = [pair for ids in samples for pair in itertools.pairwise(ids[:-1])]
    assert (EOL, EOL) not in pairs


def test_newlines_after_colons_can_be_prevented(service: TextGenerationService) -> None:
    def after_colons(**fields: Any) -> set[int]:
        samples = texts(service, prompt=":", **fields)
        return {after for ids in samples for before, after in zip([COLON, *ids], ids, strict=False)
                if before == COLON}  # fmt: skip

    assert {EOL, TWO_EOLS} & after_colons()
    assert not {EOL, TWO_EOLS} & after_colons(prevent_newline_after_colon=True)


def test_maximal_sequence_length() -> None:
    learned = ModelConfig(seq_length=64, max_position_embeddings=80)
    rope = ModelConfig(seq_length=64, position_embedding_type="rope")

    assert (max_sequence_length(learned, None), max_sequence_length(learned, 70)) == (80, 70)
    assert (max_sequence_length(rope, None), max_sequence_length(rope, 500)) == (64, 500)
    with raises_problem("inference-length-exceeds-positions", contains="80"):
        max_sequence_length(learned, 81)
    with raises_problem("inference-length-too-small", contains="1"):
        max_sequence_length(rope, 1)
