"""OpenAI's completions: requests to jobs, results to responses and events."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_ds.config.problems import UserError
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.sequences import TextSequence
from megatron_ds.inference.serving.api_schema import Defaults
from megatron_ds.inference.serving.completions_api import CompletionsApi
from megatron_ds.inference.serving.scheduler import Finished
from megatron_ds.inference.serving.service import TextGenerationService
from megatron_ds.model.gpt import GPTModel
from tests.problems import codes, fields, raises_problem
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables
from tests.unit.inference.models import EOD, model_of
from tests.unit.inference.schedulers import ByteTokenizer, Listener, running

TABLES = tables(__file__)

MAX_LENGTH = 40
TOKENIZER = ByteTokenizer()
HOT = {"temperature": 100, "max_tokens": 30}
"""Nearly any token occurs, also bytes of incomplete characters."""


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return model_of("rope")


@pytest.fixture(scope="module")
def api(model: GPTModel) -> CompletionsApi:
    service = TextGenerationService(model, TOKENIZER, MAX_LENGTH)  # type: ignore[arg-type]
    return CompletionsApi(service, Defaults(seed=1), ("tiny", "small"), 7)


def read(api: CompletionsApi, **given: Any) -> Any:
    return api.read(json.dumps({"prompt": "ABC", **given}).encode())


def run(api: CompletionsApi, job: Any) -> tuple[Finished, Listener]:
    """The result of a job, and the tokens that it reported."""
    service = api.service
    engine = GenerationEngine(service.model, slots=8, capacity=MAX_LENGTH)
    with running(engine, service.start) as server:
        _, listener = server.submit(job)
        end = listener.end
    assert isinstance(end, Finished), end
    return end, listener


def respond(api: CompletionsApi, **given: Any) -> dict[str, Any]:
    job = read(api, **given)
    response = api.response(job, run(api, job)[0])
    return json.loads(json.dumps(response, allow_nan=False))


def stream(api: CompletionsApi, **given: Any) -> list[dict[str, Any]]:
    job = read(api, stream=True, **given)
    end, listener = run(api, job)
    events = api.events(job)
    parts = [part for token in listener.tokens for part in events.of_token(token)]
    parts += events.of_end(end)
    return json.loads(json.dumps(parts, allow_nan=False))


def texts(response: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in response["choices"]]


INVALID: dict[str, list[Any]] = TABLES["invalid"]
INVALID["prompt"].append(["a"] * 129)
for values in (INVALID["prompt"], INVALID["stop"]):
    values.append("\ud800")  # half of a character, which libyaml refuses


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in INVALID.items() for value in values]
)
def test_invalid_values_are_rejected(api: CompletionsApi, name: str, value: Any) -> None:
    with raises_problem("request-value-invalid", name):
        read(api, **{name: value})


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("prompt", ["A", 5, "B", None, "\ud800"], ["[1]", "[3]", "[4]"]),
        ("prompt", [[1, 2], "A", [-1], []], ["[1]", "[2]", "[3]"]),
        ("prompt", [1, "A", True, 2], ["[1]", "[2]"]),
        ("stop", ["A", 5, ""], ["[1]", "[2]"]),
        ("stop", ["A"] * 5, [""]),
    ],
)
def test_invalid_entries_are_named(
    api: CompletionsApi, field: str, value: Any, expected: list[str]
) -> None:
    with pytest.raises(UserError) as raised:
        read(api, **{field: value})
    assert codes(raised.value.problems) == ["request-value-invalid"] * len(expected)
    for problem, path in zip(raised.value.problems, expected, strict=True):
        assert str(problem).startswith(f"{field}{path} must be ")


def test_all_invalid_fields_are_named(api: CompletionsApi) -> None:
    with pytest.raises(UserError) as raised:
        read(api, n=0, prompt=[], temperatur=1, seed=-1)
    problems = raised.value.problems
    invalid = "request-value-invalid"
    assert sorted(codes(problems)) == ["request-field-unknown", *[invalid] * 3]
    assert {("n",), ("prompt",), ("seed",)} < set(fields(problems))


@pytest.mark.parametrize(("name", "hint"), TABLES["unknown_fields"])
def test_unknown_fields_are_rejected_with_a_hint(api: CompletionsApi, name: str, hint: str) -> None:
    with raises_problem("request-field-unknown", contains=hint):
        read(api, **{name: 1})


@pytest.mark.parametrize(
    ("given", "code", "shown"),
    [*TABLES["unsuitable"], ({"prompt": ["A"] * 65, "n": 2}, "too-many-texts-in-request", "130")],
)
def test_unsuitable_requests_are_rejected(
    api: CompletionsApi, given: dict[str, Any], code: str, shown: str
) -> None:
    with raises_problem(code, contains=shown):
        read(api, **given)


def test_null_is_the_default(api: CompletionsApi) -> None:
    nulls = dict.fromkeys(set(INVALID) - {"prompt"})
    assert read(api, **nulls) == read(api)
    assert read(api).new_tokens == 16
    assert read(api).sampling.seed == 1
    neutral = {"best_of": 1, "logit_bias": {}, "suffix": "", "presence_penalty": 0.0, "user": "me"}
    neutral |= {"ignore_eos": False, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": []}
    neutral |= {"skip_special_tokens": True, "priority": 3, "response_format": {"type": "text"}}
    for name in ("tiny", "small"):
        assert read(api, **neutral, model=name, top_k=-1) == read(api)


def test_values_without_support_are_named(api: CompletionsApi) -> None:
    with raises_problem("request-value-invalid", "suffix", contains='"" or null'):
        read(api, suffix="x")


def test_top_p_of_0_takes_the_most_probable_token(api: CompletionsApi) -> None:
    request = {"max_tokens": 20, "seed": 3}
    greedy = texts(respond(api, temperature=0, **request))
    assert texts(respond(api, top_p=0, **request)) == greedy
    assert texts(respond(api, top_p=1, **request)) != greedy


def test_defaults_are_those_of_the_server(model: GPTModel, api: CompletionsApi) -> None:
    defaults = Defaults(temperature=0.5, top_k=7, top_p=0.9, seed=3)
    other = CompletionsApi(api.service, defaults, ("tiny",))
    sampling = read(other).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.5, 7, 0.9, 3)
    assert read(other, temperature=0).sampling.greedy
    unset = CompletionsApi(api.service, Defaults(), ("tiny",))
    assert read(unset).sampling.seed != read(unset).sampling.seed


def test_prompts_have_several_forms(api: CompletionsApi) -> None:
    first, second = (TOKENIZER.encode(text) for text in ("ABC", "é"))
    greedy = {"temperature": 0, "max_tokens": 9}
    both = texts(respond(api, prompt=["ABC", "é"], **greedy))
    assert len(set(both)) == 2
    assert texts(respond(api, prompt=[first, second], **greedy)) == both
    assert texts(respond(api, prompt=first, **greedy)) == both[:1]
    assert texts(respond(api, prompt="é", **greedy)) == both[1:]
    assert read(api, prompt="").prompts == read(api, prompt=[""]).prompts == [[EOD]]


def test_samples_differ_and_depend_on_the_seed(api: CompletionsApi) -> None:
    request: dict[str, Any] = {"prompt": ["A", "B"], "n": 3, "best_of": 3, **HOT}
    first = respond(api, seed=5, **request)
    assert [choice["index"] for choice in first["choices"]] == list(range(6))
    assert len(set(texts(first))) == 6
    assert texts(respond(api, seed=5, **request)) == texts(first)
    assert texts(respond(api, seed=6, **request)) != texts(first)
    # The samples of a prompt stand together.
    echoed = texts(respond(api, seed=5, echo=True, **request))
    assert echoed == ["AB"[number // 3] + text for number, text in enumerate(texts(first))]


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(api: CompletionsApi) -> None:
    request: dict[str, Any] = {"max_tokens": 20, "temperature": 0}
    whole = respond(api, **request)["choices"][0]
    assert whole["finish_reason"] == "length"
    text = whole["text"]
    stop = text[5:8]  # tokens of this model have one or two characters
    for stops in (stop, [stop], ["~~", stop]):
        response = respond(api, stop=stops, **request)
        (choice,) = response["choices"]
        assert choice["text"] == text[: text.find(stop)]
        assert choice["finish_reason"] == "stop"
        assert response["usage"]["completion_tokens"] < 20
    (choice,) = respond(api, stop=["~~"], **request)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    (choice,) = respond(api, stop=stop, echo=True, **request)["choices"]
    assert choice["text"] == "ABC" + text[: text.find(stop)]


def test_the_end_of_a_document_is_no_part_of_a_text(api: CompletionsApi) -> None:
    response = respond(api, n=32, logprobs=0, **HOT)
    reasons = {choice["finish_reason"] for choice in response["choices"]}
    assert reasons == {"length", "stop"}
    for choice in response["choices"]:
        tokens = choice["logprobs"]["tokens"]
        assert (tokens[-1] == "<end>") == (choice["finish_reason"] == "stop")
        assert "<end>" not in choice["text"]


def test_logprobs_are_those_of_the_model(api: CompletionsApi, model: GPTModel) -> None:
    job = read(api, echo=True, logprobs=2, max_tokens=9, temperature=2, stop="~~")
    finished = run(api, job)[0]
    (sequence,) = finished.result
    assert isinstance(sequence, TextSequence)
    ids = sequence.ids
    (choice,) = api.response(job, finished)["choices"]
    logprobs = choice["logprobs"]

    with torch.no_grad():
        expected = model(torch.tensor([ids]))[0].log_softmax(dim=-1)[:-1]
    chosen = [float(row[number]) for row, number in zip(expected, ids[1:], strict=True)]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(chosen, abs=1e-4)
    assert logprobs["tokens"] == [TOKENIZER.decode([each]) for each in ids]
    assert logprobs["top_logprobs"][0] is None
    tops = logprobs["top_logprobs"][1:]
    tokens = logprobs["tokens"][1:]
    for top, token, row, value in zip(tops, tokens, expected, chosen, strict=True):
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert top[token] > value - 1e-4  # of the most probable token with this text
        assert len(top) <= 3
    assert any(len(top) == 3 for top in tops)


def test_a_token_does_not_hide_a_more_probable_one_of_the_same_text(api: CompletionsApi) -> None:
    """Bytes of incomplete characters share their text."""
    one = TOKENIZER.encode("é")[0]
    other = TOKENIZER.encode("€")[0]
    tops = [[(one, -0.5), (1, -1.0)]]
    (top,) = api.logprobs_of([other], [-3.0], tops)["top_logprobs"]
    assert top == {"\ufffd": -0.5, TOKENIZER.decode([1]): -1.0}


@pytest.mark.parametrize("is_echoed", [False, True])
def test_offsets_are_places_in_the_text(api: CompletionsApi, is_echoed: bool) -> None:
    (choice,) = respond(api, logprobs=1, echo=is_echoed, temperature=0)["choices"]
    logprobs = choice["logprobs"]
    pairs = zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    assert all(choice["text"][place:].startswith(token) for place, token in pairs)


def test_prompts_are_scored_without_new_tokens(api: CompletionsApi) -> None:
    request: dict[str, Any] = {"prompt": ["ABC", "é"], "logprobs": 1, "echo": True}
    response = respond(api, max_tokens=0, **request)
    assert texts(response) == ["ABC", "é"]
    assert response["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
    longer = respond(api, max_tokens=1, **request)
    for scored, choice in zip(response["choices"], longer["choices"], strict=True):
        assert scored["finish_reason"] == "length"
        first, *values = choice["logprobs"]["token_logprobs"][:-1]
        assert scored["logprobs"]["token_logprobs"] == [first, *map(pytest.approx, values)]


def test_a_response_describes_itself(api: CompletionsApi) -> None:
    first, second = (respond(api, n=2, temperature=0, max_tokens=4) for _ in range(2))
    assert first["id"] != second["id"]
    assert (first["object"], first["model"]) == ("text_completion", "tiny")
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert first["choices"][0]["logprobs"] is None
    models = api.models()["data"]
    assert [model["id"] for model in models] == ["tiny", "small"]
    assert {(model["created"], model["max_model_len"]) for model in models} == {(7, MAX_LENGTH)}
    assert api.error("no", 400, ["some-code"])["error"]["code"] == "some-code"
    assert api.error("no", 500)["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("echo", "has_stops", "seed"), with_proofs(*rotated((False, True), (False, True), range(4)))
)
def test_events_together_are_the_response(
    api: CompletionsApi, seed: int, has_stops: bool, echo: bool
) -> None:
    """Claim (serving): streamed parts together are the text and log-probabilities of the
    response"""
    request: dict[str, Any] = {"prompt": ["é", "AB"], "n": 4, "seed": seed, "logprobs": 2, **HOT}
    request["echo"] = echo
    if has_stops:
        request["stop"] = ["A", "~\ufffd", "\ufffd ", "5"]
    response = respond(api, **request)
    events = stream(api, stream_options={"include_usage": True}, **request)

    *parts, usage = events
    assert (usage["choices"], usage["usage"]) == ([], response["usage"])
    assert {part["id"] for part in events} == {usage["id"]}
    choices = [part["choices"][0] for part in parts]
    assert len(choices) > len(response["choices"])
    for expected in response["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        for name, values in expected["logprobs"].items():
            found = [each for choice in mine for each in choice["logprobs"][name]]
            if name in ("tokens", "text_offset"):
                assert found == values
            elif name == "token_logprobs":
                assert found == [value and pytest.approx(value, abs=1e-4) for value in values]
            else:
                assert [each and list(each) for each in found] == [
                    each and list(each) for each in values
                ]
    whole = [choice["text"] for choice in response["choices"]]
    assert any("\ufffd" in text for text in whole)
    assert not has_stops or any(choice["finish_reason"] == "stop" for choice in choices)


def test_a_scored_prompt_is_an_event(api: CompletionsApi) -> None:
    request: dict[str, Any] = {"max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = respond(api, **request)["choices"]
    first, last = (event["choices"][0] for event in stream(api, **request))
    assert first["logprobs"] == choice["logprobs"]
    assert (first["text"], last["text"], last["finish_reason"]) == ("ABC", "", "length")


def test_an_echo_needs_no_logprobs(api: CompletionsApi) -> None:
    events = stream(api, echo=True, temperature=0, max_tokens=5)
    (choice,) = respond(api, echo=True, temperature=0, max_tokens=5)["choices"]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


def test_events_have_no_usage_unless_wanted(api: CompletionsApi) -> None:
    events = stream(api, temperature=0, max_tokens=5)
    assert all(len(event["choices"]) == 1 for event in events)
    assert events[0]["choices"][0]["logprobs"] is None


def test_texts_of_some_tokenizers_start_with_a_space(
    model: GPTModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with SentencePiece, whose first token has none."""
    tokenizer = ByteTokenizer()
    monkeypatch.setattr(tokenizer, "decode", lambda ids: " ".join(map(str, ids)))
    service = TextGenerationService(model, tokenizer, MAX_LENGTH)  # type: ignore[arg-type]
    api = CompletionsApi(service, Defaults(), ("tiny",))
    request: dict[str, Any] = {"prompt": [5, 6], "temperature": 0, "max_tokens": 4}

    (new,) = texts(respond(api, **request))
    job = read(api, echo=True, **request)
    finished = run(api, job)[0]
    (sequence,) = finished.result
    assert isinstance(sequence, TextSequence)
    assert texts(api.response(job, finished)) == ["5 6" + new] == [tokenizer.decode(sequence.ids)]
    events = stream(api, **request)
    assert "".join(event["choices"][0]["text"] for event in events) == new
