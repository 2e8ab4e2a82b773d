"""Queries to answers, with a small model and a tokenizer of bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_ds.config import ModelConfig
from megatron_ds.inference.api_schema import Defaults, read
from megatron_ds.inference.logprobs import score
from megatron_ds.inference.service import TextGenerationService, max_sequence_length
from megatron_ds.model.gpt import GPTModel
from tests.unit.inference.models import EOD, VOCAB, model_of

LINE, TWO_LINES, COLON = 10, 11, 12
MAX_LENGTH = 40
SPECIAL = {LINE: "\n", TWO_LINES: "\n\n", COLON: ":", EOD: "<end>"}


class Signs:
    """A tokenizer of single characters; id 89 ends a document."""

    vocab_size = VOCAB
    eod = EOD
    fingerprint = "signs"

    def encode(self, text: str) -> list[int]:
        if "?" in text:
            raise ValueError("there is no ?")
        ids = {sign: number for number, sign in SPECIAL.items() if len(sign) == 1}
        return [ids.get(sign, ord(sign) % VOCAB) for sign in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(SPECIAL.get(number, chr(0x4E00 + number)) for number in ids)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return model_of("rope")


@pytest.fixture
def answerer(model: GPTModel) -> TextGenerationService:
    return TextGenerationService(
        model, Signs(), max_length=MAX_LENGTH, usual_new_tokens=30, micro_batch_size=2
    )


@pytest.fixture
def many(model: GPTModel) -> TextGenerationService:
    """As fast as can be with many prompts."""
    return TextGenerationService(
        model, Signs(), max_length=MAX_LENGTH, usual_new_tokens=9, micro_batch_size=128
    )


def answer(answerer: TextGenerationService, **fields: Any) -> dict[str, Any]:
    query = read(json.dumps(fields).encode(), Defaults())
    job = answerer.job(query)
    found = answerer.answer(job, answerer.run(job, lambda: True))
    return json.loads(json.dumps(found, allow_nan=False))


def problem(answerer: TextGenerationService, **fields: Any) -> str:
    with pytest.raises(ValueError) as error:
        answerer.job(read(json.dumps(fields).encode(), Defaults()))
    return str(error.value)


def test_an_answer_holds_prompt_and_continuation(answerer: TextGenerationService) -> None:
    got = answer(answerer, prompts=["abc", "d"], tokens_to_generate=5, top_k=1)

    assert set(got) == {"text", "segments", "tokens", "logprobs"}
    assert got["logprobs"] is None
    decode, encode = Signs().decode, Signs().encode
    for prompt, text, segments, tokens in zip(
        ["abc", "d"], got["text"], got["segments"], got["tokens"], strict=True
    ):
        assert tokens[: len(prompt)] == encode(prompt)
        assert len(tokens) == len(prompt) + 5
        assert text == decode(tokens) == "".join(segments)
        assert len(segments) == len(tokens)


def test_logprobs_are_those_of_every_token_but_the_first(
    answerer: TextGenerationService, model: GPTModel
) -> None:
    got = answer(
        answerer, prompts=["abc"], tokens_to_generate=4, logprobs=True, top_n_logprobs=2, top_k=1
    )

    expected = score(model, got["tokens"][0], top_n=2)
    assert got["logprobs"] == [pytest.approx(expected.logprobs)]
    assert len(got["logprobs"][0]) == 6
    for shown, top in zip(got["top_n_logprobs"][0], expected.top, strict=True):
        assert shown == pytest.approx({Signs().decode([number]): value for number, value in top})
    # Greedy: what was chosen is the most probable.
    assert got["logprobs"][0][2:] == [max(top.values()) for top in got["top_n_logprobs"][0][2:]]


def test_no_token_to_generate_scores_the_prompts(
    answerer: TextGenerationService, model: GPTModel
) -> None:
    got = answer(answerer, prompts=["abcd", "b"], tokens_to_generate=0, logprobs=True)

    assert got["tokens"] == Signs().encode_batch(["abcd", "b"])
    assert got["logprobs"] == [pytest.approx(score(model, got["tokens"][0]).logprobs), []]


def test_the_same_seed_gives_the_same_text_and_none_another(
    answerer: TextGenerationService,
) -> None:
    fields: dict[str, Any] = {"prompts": ["ab"] * 3, "tokens_to_generate": 8, "temperature": 3}

    first = answer(answerer, **fields, random_seed=5)

    assert answer(answerer, **fields, random_seed=5) == first
    assert answer(answerer, **fields, random_seed=6) != first
    assert len(set(first["text"])) == 3
    assert answer(answerer, **fields)["text"] != answer(answerer, **fields)["text"]


def test_without_a_number_there_is_as_much_as_fits(answerer: TextGenerationService) -> None:
    short, long = answer(answerer, prompts=["a", "a" * 35], temperature=50)["tokens"]

    assert len(short) == 31 or short[-1] == EOD
    assert len(long) == MAX_LENGTH or long[-1] == EOD


def test_what_does_not_fit_is_named(answerer: TextGenerationService) -> None:
    prompts = ["a", "a" * 36]
    assert problem(answerer, prompts=prompts, tokens_to_generate=5) == (
        "prompt 2: its 36 tokens and the 5 to generate are more than the 40 that fit"
    )
    assert answer(answerer, prompts=prompts, tokens_to_generate=4)
    assert "41 tokens and the 0" in problem(
        answerer, prompts=["a" * 41], tokens_to_generate=0, logprobs=True
    )
    assert answer(answerer, prompts=["a" * 40], tokens_to_generate=0, logprobs=True)
    assert "its 40 tokens leave no room" in problem(answerer, prompts=["a" * 40])
    assert "prompt 2: there is no ?" in problem(answerer, prompts=["a", "?"])
    assert f"stop_token {VOCAB} is outside" in problem(
        answerer, prompts=["a"], beam_width=2, stop_token=VOCAB
    )


def test_add_bos_starts_after_the_end_of_a_document(answerer: TextGenerationService) -> None:
    got = answer(answerer, prompts=["", "b"], tokens_to_generate=2, add_BOS=True)
    assert [ids[:-2] for ids in got["tokens"]] == [[EOD], [EOD, ord("b") % VOCAB]]


def test_beam_search_gives_texts_and_scores(answerer: TextGenerationService) -> None:
    got = answer(answerer, prompts=["abc"], tokens_to_generate=5, beam_width=3)

    assert set(got) == {"text", "segments", "tokens", "scores"}
    assert len(got["text"]) == len(got["scores"]) == 3
    assert got["scores"] == sorted(got["scores"], reverse=True)
    assert all(text.startswith(Signs().decode(Signs().encode("abc"))) for text in got["text"])


def texts(answerer: TextGenerationService, **fields: Any) -> list[list[int]]:
    """The new tokens of many drawn texts; with so high a temperature nearly any token is drawn."""
    prompt = fields.pop("prompt", "a")
    got = answer(
        answerer,
        prompts=[prompt] * 128,
        tokens_to_generate=36,
        temperature=100,
        random_seed=1,
        **fields,
    )
    return [ids[len(Signs().encode(prompt)) :] for ids in got["tokens"]]


def test_lines_end_texts(many: TextGenerationService) -> None:
    ended = [ids for ids in texts(many, stop_on_eol=True) if len(ids) < 36]
    assert {ids[-1] for ids in ended} == {LINE, TWO_LINES, EOD}
    assert not any({LINE, TWO_LINES} & set(ids[:-1]) for ids in ended)


def test_empty_lines_end_texts(many: TextGenerationService) -> None:
    # After one line end, another is an empty line.
    drawn = texts(many, stop_on_double_eol=True, prompt="a\n")
    assert all(TWO_LINES not in ids[:-1] for ids in drawn)
    assert any(LINE in ids[1:-1] for ids in drawn)
    assert any(ids == [LINE] for ids in drawn) == any(ids[0] == LINE for ids in drawn)
    pairs = [pair for ids in drawn for pair in itertools.pairwise(ids[:-1])]
    assert (LINE, LINE) not in pairs


def test_a_colon_is_followed_by_no_line_end(many: TextGenerationService) -> None:
    def after_colons(**fields: Any) -> set[int]:
        drawn = texts(many, prompt=":", **fields)
        return {after for ids in drawn for before, after in zip([COLON, *ids], ids, strict=False)
                if before == COLON}  # fmt: skip

    assert {LINE, TWO_LINES} & after_colons()
    assert not {LINE, TWO_LINES} & after_colons(prevent_newline_after_colon=True)


def test_how_long_a_text_may_be() -> None:
    learned = ModelConfig(seq_length=64, max_position_embeddings=80)
    rope = ModelConfig(seq_length=64, position_embedding_type="rope")

    assert max_sequence_length(learned, None) == 80
    assert max_sequence_length(learned, 70) == 70
    assert max_sequence_length(rope, None) == 64
    assert max_sequence_length(rope, 500) == 500
    with pytest.raises(ValueError, match="--inference-max-seq-length 81: the model has 80"):
        max_sequence_length(learned, 81)
    with pytest.raises(ValueError, match="--inference-max-seq-length 1: must be 2 or more"):
        max_sequence_length(rope, 1)
