"""Request bodies of any bytes: a valid request or a UserError, and an answer of a live server."""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.serving import server as server_module
from megatron_ds.inference.serving.api_schema import Defaults, GenerationRequest, read, read_fields
from megatron_ds.inference.serving.chat_api import ChatApi, ChatRequest
from megatron_ds.inference.serving.completions_api import CompletionRequest, CompletionsApi
from megatron_ds.inference.serving.megatron_api import MegatronApi
from megatron_ds.inference.serving.scheduler import Scheduler
from megatron_ds.inference.serving.server import ServerOptions, TextServer, listen
from megatron_ds.inference.serving.service import TextGenerationService
from megatron_ds.tokenizer.chat_template import ChatTemplate
from tests.fuzz.fuzz_helpers import FUZZ_SETTINGS, JSON, REJECTED, read_or_error
from tests.unit.inference.models import model_of
from tests.unit.inference.schedulers import ByteTokenizer, LocalLink

FIELDS = [field.name for field in dataclasses.fields(GenerationRequest)]
COMPLETION_FIELDS = [field.name for field in dataclasses.fields(CompletionRequest)]
GOOD: dict[str, Any] = {"prompts": ["a", "b"], "tokens_to_generate": 5, "temperature": 0.5}
GOOD |= {"top_p": 0.9, "logprobs": True, "random_seed": 1}


def check(body: bytes, *names: str) -> None:
    """`names`: fields, one of which an error about a field must name."""
    request = read_or_error(lambda: read(body, Defaults()), "the body", "field", *names)
    if request is REJECTED:
        return
    assert isinstance(request, GenerationRequest)
    assert request.prompts
    assert all(isinstance(prompt, str) for prompt in request.prompts)
    assert 0 < request.temperature <= 100
    assert math.isfinite(request.length_penalty)
    assert request.random_seed is None or request.random_seed >= 0


@given(body=st.binary(max_size=40) | st.text(max_size=20).map(lambda text: text.encode("utf-16")))
@FUZZ_SETTINGS
def test_any_bytes(body: bytes) -> None:
    check(body)


@given(value=JSON)
@FUZZ_SETTINGS
def test_any_json(value: object) -> None:
    check(json.dumps(value).encode(), "prompts")


@given(fields=st.dictionaries(st.sampled_from([*FIELDS, "max_len", "x"]), JSON, max_size=3))
@FUZZ_SETTINGS
def test_any_value_in_any_field(fields: dict[str, object]) -> None:
    check(json.dumps({**GOOD, **fields}).encode(), *fields, *GOOD)


@given(at=st.integers(0, len(json.dumps(GOOD)) - 1), new=st.integers(0, 255))
@FUZZ_SETTINGS
def test_one_changed_byte(at: int, new: int) -> None:
    body = bytearray(json.dumps(GOOD).encode())
    body[at] = new
    check(bytes(body), *FIELDS)


@given(body=JSON | st.dictionaries(st.sampled_from(COMPLETION_FIELDS), JSON, max_size=4))
@FUZZ_SETTINGS
def test_any_completion(body: object) -> None:
    text = json.dumps(body).encode()

    def read_completion() -> CompletionRequest:
        fields = read_fields(text, CompletionRequest, "prompt", null_is_default=True)
        return CompletionRequest(**fields)

    request = read_or_error(read_completion, "the body", "field", *COMPLETION_FIELDS)
    if request is not REJECTED:
        assert isinstance(request, CompletionRequest)
        assert request.n >= 1
        assert 0 <= request.temperature <= 100
        list(request.problems())


DEADLINE = 60.0
"""Seconds of a request, which takes milliseconds on an idle machine."""
MAX_LENGTH = 64
PATHS = ("/api", "/v1/completions", "/v1/chat/completions")
TEXTS = ("A", "AB", "é€", "A" * 20, "\n", "A: B", "ab", "", "AB~", "x" * 100_000, "\ud800")
KINDS = {"prompts": GenerationRequest, "prompt": CompletionRequest, "messages": ChatRequest}
POOL: tuple[Any, ...] = (
    0,
    1e-300,
    1e-45,
    1e-9,
    0.1,
    0.5,
    0.9,
    1,
    2,
    3,
    50,
    1000,
    False,
    True,
    -10,
    "A",
    ["A", "B"],
    ["\n" * 50],
    {"include_usage": True},
)
"""Values of fields, as far as they are valid by themselves."""


def valid_fields(kind: type[Any]) -> st.SearchStrategy[dict[str, Any]]:
    pairs = [
        (field.name, value)
        for field in dataclasses.fields(kind)
        for value in POOL
        if field.name not in (*KINDS, "model") and field.metadata["is_valid"](value)
    ]
    return st.lists(st.sampled_from(pairs), max_size=5).map(dict)


def one_or_more(values: tuple[Any, ...]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(values), min_size=1, max_size=3)


MESSAGES = tuple({"role": role, "content": text} for role in ("user", "tool") for text in TEXTS)
GIVEN = {
    "prompts": one_or_more(TEXTS),
    "prompt": st.sampled_from(TEXTS) | one_or_more(TEXTS) | one_or_more((0, 5, 89, 99)),
    "messages": one_or_more(MESSAGES),
}
VALID = [
    st.tuples(
        st.just(path),
        st.tuples(valid_fields(kind), GIVEN[name].map(lambda value, name=name: {name: value})).map(
            lambda parts: json.dumps(parts[0] | parts[1]).encode()
        ),
    )
    for path, (name, kind) in zip(PATHS, KINDS.items(), strict=True)
]
ANY = st.tuples(st.sampled_from(PATHS), JSON.map(lambda value: json.dumps(value).encode()))
DECAYS = {"prompts": ["A"], "tokens_to_generate": 60, "top_p": 0.9, "top_p_decay": 0.1}
MANY_KEYS = b",".join(b'"%d":0' % (number % 200_000) for number in range(200_001))


def test_a_live_server_answers_each_request_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is healthy and idle afterwards.

    Claim (serving): a live server answers requests of any kind in time, is healthy and idle
    afterwards, and ends at a signal whatever it computes
    """
    monkeypatch.setattr(server_module, "end_process", lambda code: os._exit(99))  # not with 0
    service = TextGenerationService(model_of("rope"), ByteTokenizer(), MAX_LENGTH)  # type: ignore[arg-type]
    engine = GenerationEngine(service.model, slots=4, capacity=MAX_LENGTH)
    link: Any = LocalLink()
    scheduler = Scheduler(engine, service.start, link)
    completions = CompletionsApi(service, Defaults(), ("tiny",))
    template = ChatTemplate(
        "{% for each in messages %}{% if each.role == 'tool' %}{{ raise_exception('no') }}"
        "{% endif %}{{ each.content }}{% endfor %}",
        {},
    )
    chat = ChatApi(completions, template)
    apis = dict(zip(PATHS, (MegatronApi(service, Defaults()), completions, chat), strict=True))
    log = list[str]()
    statuses = list[int]()
    server = TextServer(scheduler, apis, log.append, ServerOptions(timeout=DEADLINE), {})

    def send(port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def fuzz(port: int) -> None:
        @given(request=st.one_of(*VALID, ANY))
        @example(request=("/api", json.dumps(DECAYS).encode()))
        @example(request=("/v1/completions", b'{"prompt": "A", "top_p": 1e-300}'))
        @example(request=("/v1/completions", b"{%b}" % MANY_KEYS))
        @example(request=("/v1/completions", b'{"prompt": ["A", {%b}]}' % MANY_KEYS))
        @FUZZ_SETTINGS
        def check(request: tuple[str, bytes]) -> None:
            status, answer = send(port, "POST", *request)
            statuses.append(status)
            assert status in (200, 400), answer
            is_stream = answer.startswith(b"data:")
            assert answer.endswith(b"data: [DONE]\n\n") if is_stream else json.loads(answer)

        check()
        assert statuses.count(200) > len(statuses) / 10
        assert send(port, "GET", "/health") == (200, b'{"status":"ok","requests":0}')

    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        fuzzing = pool.submit(fuzz, listener.getsockname()[1])
        fuzzing.add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))
        server.run(listener)
        fuzzing.result()
    assert all("prompts:" in line for line in log), log
