"""OpenAI's chat completions: conversations to jobs, results to messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron_ds.config.problems import UserError
from megatron_ds.inference.serving.api_schema import Defaults
from megatron_ds.inference.serving.chat_api import ChatApi
from megatron_ds.inference.serving.completions_api import CompletionsApi
from megatron_ds.inference.serving.service import TextGenerationService
from megatron_ds.model.gpt import GPTModel
from megatron_ds.tokenizer.chat_template import ChatTemplate
from tests.problems import raises_problem
from tests.tables import tables
from tests.unit.inference.models import model_of
from tests.unit.inference.schedulers import ByteTokenizer
from tests.unit.inference.test_completions_api import run

TABLES = tables(__file__)

MAX_LENGTH = 40
TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(
    "{% for each in messages %}{{ each.role[0] | upper }}: {{ each.content }} {% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}",
    {},
)
MESSAGES = [{"role": "system", "content": "X"}, {"role": "user", "content": "HI"}]
PROMPT = "S: X U: HI A:"
HOT: dict[str, Any] = {"temperature": 100, "max_tokens": 20, "seed": 5}


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return model_of("rope")


@pytest.fixture(scope="module")
def api(model: GPTModel) -> ChatApi:
    service = TextGenerationService(model, TOKENIZER, MAX_LENGTH)  # type: ignore[arg-type]
    return ChatApi(CompletionsApi(service, Defaults(), ("tiny",)), TEMPLATE)


def read(api: ChatApi, **given: Any) -> Any:
    return api.read(json.dumps({"messages": MESSAGES, **given}).encode())


def respond(api: ChatApi, **given: Any) -> dict[str, Any]:
    job = read(api, **given)
    response = api.response(job, run(api.completions, job)[0])
    return json.loads(json.dumps(response, allow_nan=False))


def test_a_message_is_the_completion_of_the_conversation(api: ChatApi) -> None:
    request: dict[str, Any] = {"n": 3, "stop": ["5", "~"], **HOT}
    completions = api.completions
    job = completions.read(json.dumps({"prompt": PROMPT, "logprobs": 2, **request}).encode())
    expected = completions.response(job, run(completions, job)[0])
    response = respond(api, logprobs=True, top_logprobs=2, **request)

    assert (response["object"], response["usage"]) == ("chat.completion", expected["usage"])
    for choice, other in zip(response["choices"], expected["choices"], strict=True):
        assert choice["message"] == {"role": "assistant", "content": other["text"]}
        assert choice["finish_reason"] == other["finish_reason"]
        scores = choice["logprobs"]["content"]
        values = other["logprobs"]
        assert [each["token"] for each in scores] == values["tokens"]
        assert [each["logprob"] for each in scores] == values["token_logprobs"]
        assert all(bytes(each["bytes"]).decode() == each["token"] for each in scores)
        for each, top in zip(scores, values["top_logprobs"], strict=True):
            shown = {other["token"]: other["logprob"] for other in each["top_logprobs"]}
            assert list(shown.items()) == list(top.items())[:2]
    assert "5" not in "".join(each["message"]["content"] for each in response["choices"])


def test_events_together_are_the_response(api: ChatApi) -> None:
    request: dict[str, Any] = {"n": 4, "logprobs": True, **HOT}
    response = respond(api, **request)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    job = read(api, **options, **request)
    end, listener = run(api.completions, job)
    events = api.events(job)
    parts = [part for token in listener.tokens for part in events.of_token(token)]
    parts += events.of_end(end)
    *parts, usage = json.loads(json.dumps(parts, allow_nan=False))

    assert (usage["choices"], usage["usage"]) == ([], response["usage"])
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    choices = [part["choices"][0] for part in parts]
    for expected in response["choices"]:
        mine = [choice for choice in choices if choice["index"] == expected["index"]]
        assert [choice["delta"].get("role") for choice in mine] == [
            "assistant",
            *[None] * (len(mine) - 1),
        ]
        text = "".join(choice["delta"]["content"] for choice in mine)
        assert text == expected["message"]["content"]
        scores = [each["token"] for choice in mine for each in choice["logprobs"]["content"]]
        assert scores == [each["token"] for each in expected["logprobs"]["content"]]
        assert [each["finish_reason"] for each in mine][-1] == expected["finish_reason"]


def test_an_answer_ends_at_every_end_token(model: GPTModel) -> None:
    """Claim (serving): an answer ends at every end token of the model, which is no part of it"""
    tokenizer = ByteTokenizer()
    service = TextGenerationService(model, tokenizer, MAX_LENGTH)  # type: ignore[arg-type]
    api = ChatApi(CompletionsApi(service, Defaults(), ("tiny",)), TEMPLATE)
    request: dict[str, Any] = {"n": 4, **HOT}
    free, _ = run(api.completions, read(api, **request))
    ids = [sequence.new_ids for sequence in free.result]
    tokenizer.further_ends = frozenset(new[3 + index] for index, new in enumerate(ids))
    expected = []
    for new in ids:
        first = next(at for at, token in enumerate(new) if token in tokenizer.ends)
        expected.append(tokenizer.decode(new[:first]))

    choices = respond(api, **request)["choices"]
    assert [choice["message"]["content"] for choice in choices] == expected
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    job = read(api, stream=True, **request)
    end, listener = run(api.completions, job)
    events = api.events(job)
    texts = [""] * len(ids)
    for part in [*(part for token in listener.tokens for part in events.of_token(token)),
                 *events.of_end(end)]:  # fmt: skip
        (choice,) = part["choices"]
        texts[choice["index"]] += choice["delta"]["content"]
    assert texts == expected


def test_the_answer_fills_the_context_by_default(api: ChatApi) -> None:
    used = len(TOKENIZER.encode(PROMPT))
    response = respond(api, temperature=0)
    assert response["usage"]["completion_tokens"] == MAX_LENGTH - used
    for name in ("max_tokens", "max_completion_tokens"):
        assert read(api, **{name: 3}).new_tokens == 3


def test_parts_of_a_message_are_joined(api: ChatApi) -> None:
    parts = [{"type": "text", "text": text} for text in ("A", "B")]
    assert read(api, messages=[{"role": "user", "content": parts}]).prompts == [
        TOKENIZER.encode("U: A\nB A:")
    ]


INVALID: dict[str, list[Any]] = TABLES["invalid"]


@pytest.mark.parametrize("name", INVALID)
def test_invalid_values_are_rejected(api: ChatApi, name: str) -> None:
    for value in INVALID[name]:
        with raises_problem("request-value-invalid", name):
            read(api, **{name: value})


@pytest.mark.parametrize("case", TABLES["invalid_messages"])
def test_errors_name_message_and_field(api: ChatApi, case: str) -> None:
    """Claim (serving): errors about messages name each message and field, all at once"""
    messages, expected = TABLES["invalid_messages"][case]
    with pytest.raises(UserError) as raised:
        read(api, messages=messages, temperature="hot")
    *shown, other = sorted(raised.value.problems, key=lambda each: each.fields, reverse=False)
    assert other.fields == ("temperature",)
    assert {problem.fields for problem in shown} == {("messages",)}
    texts = dict(str(problem).split(" ", 1) for problem in shown)
    assert texts.keys() == {f"messages{path}" for path in expected}
    for path, word in expected.items():
        assert word in texts[f"messages{path}"]
    for problem in shown:
        is_missing = problem.code == "request-part-missing"
        assert is_missing != (problem.code == "request-value-invalid")


def test_messages_that_a_client_has_received_may_be_sent_back(api: ChatApi) -> None:
    answer = {"role": "assistant", "content": "B", "refusal": None, "annotations": None}
    answer |= {"audio": None, "function_call": None, "tool_calls": None}
    plain = [MESSAGES[1], {"role": "assistant", "content": "B"}, MESSAGES[1]]
    expected = read(api, messages=plain).prompts
    assert read(api, messages=[MESSAGES[1], answer, MESSAGES[1]]).prompts == expected
    empty = [MESSAGES[1], answer | {"tool_calls": []}, MESSAGES[1]]
    assert read(api, messages=empty).prompts == expected
    defined = "{{ 'A' if messages[1].tool_calls is defined }}{{ messages[1].content }}"
    other = ChatApi(api.completions, ChatTemplate(defined, {}))
    assert read(other, messages=empty).prompts == [TOKENIZER.encode("B")]


def test_unsuitable_requests_are_rejected(api: ChatApi) -> None:
    with raises_problem("request-field-needs-another", "top_logprobs", "logprobs"):
        read(api, top_logprobs=1)
    with raises_problem("prompt-and-new-tokens-exceed-length", "tokens_to_generate"):
        read(api, max_tokens=MAX_LENGTH)
    with raises_problem("chat-template-missing", contains="POST /v1/completions"):
        read(ChatApi(api.completions, None))
