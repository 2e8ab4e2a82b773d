"""What others write for OpenAI's completions: its client, lm-evaluation-harness, transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.runs import DEADLINE, PROGRAMS, REPOSITORY, Launcher, free_port
from tests.e2e.servers import Server

GOLDEN = REPOSITORY / "tests" / "golden" / "tokenizers"
CONVERT = REPOSITORY / "tools" / "convert_checkpoint.py"
MAX_LENGTH = 64
PROMPTS = ["The quick brown", "1234", "naïve café €", "Привет"]
CHAT = """{% for each in messages %}{% if each.role != "user" %}{{ raise_exception("no role") }}
{% endif %}{{ each.role }}: {{ each.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
LONG: dict[str, Any] = {"prompt": ["The"] * 128, "max_tokens": 60, "temperature": 100}
"""Thousands of forward passes with a text at a time."""


@pytest.fixture(scope="module")
def trained(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that knows a part of the corpus by heart."""
    folder = tmp_path_factory.mktemp("clients") / "run"
    settings = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": MAX_LENGTH,
        "micro_batch_size": 4,
        "lr": 6e-3,
        "data_path": GOLDEN / "GPT2BPETokenizer",
        "data_cache_path": folder,
        "split": "100,0,0",
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": GOLDEN / "vocab.json",
        "merge_file": GOLDEN / "merges.txt",
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "log_interval": 100,
        "eval_iters": 0,
        "num_workers": 0,
        "train_iters": 150,
        "save": folder,
    }
    launcher.start(settings).succeed()
    return folder


@pytest.fixture(scope="module")
def exported(launcher: Launcher, trained: Path) -> Path:
    """The checkpoint as a model of transformers."""
    folder = trained.with_name("exported")
    launcher.start({"load": trained, "save": folder, "to": "hf"}, script=CONVERT).succeed()
    return folder


def client_of(server: Server, key: str = "none") -> openai.OpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=DEADLINE)


def check_openai_client(server: Server, name: str) -> None:
    client = client_of(server)
    (model,) = client.models.list().data
    assert (model.id, model.object) == (name, "model")

    response = client.completions.create(model=name, prompt=PROMPTS, temperature=0, max_tokens=20)
    texts = [choice.text for choice in response.choices]
    assert [choice.index for choice in response.choices] == [0, 1, 2, 3]
    assert response.usage is not None
    assert response.usage.completion_tokens == 80
    fields = {"prompts": PROMPTS, "tokens_to_generate": 20, "top_k": 1}
    _, megatron = server.put(fields)
    assert megatron["text"] == [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    (choice,) = client.completions.create(
        model=name, prompt=PROMPTS[0], temperature=0, max_tokens=20, logprobs=2, echo=True
    ).choices
    assert choice.text == PROMPTS[0] + texts[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    stop = texts[0][6:9]
    (choice,) = client.completions.create(
        model=name, prompt=PROMPTS[0], temperature=0, max_tokens=20, stop=stop
    ).choices
    assert (choice.text, choice.finish_reason) == (texts[0][: texts[0].find(stop)], "stop")

    hot: dict[str, Any] = {"temperature": 100, "max_tokens": 40, "n": 3, "seed": 7}
    whole = client.completions.create(model=name, prompt=PROMPTS[2], **hot)
    parts = ["", "", ""]
    usage = None
    for event in client.completions.create(
        model=name, prompt=PROMPTS[2], stream=True, stream_options={"include_usage": True}, **hot
    ):
        for each in event.choices:
            parts[each.index] += each.text
        usage = event.usage or usage
    assert parts == [choice.text for choice in whole.choices]
    assert usage == whole.usage

    for wrong, kind, code in (
        ({"model": "other"}, openai.NotFoundError, "model-not-served"),
        ({"temperature": -1}, openai.BadRequestError, "request-value-invalid"),
        ({"prompt": [999]}, openai.BadRequestError, "prompt-id-out-of-range"),
        ({"max_tokens": 100}, openai.BadRequestError, "prompt-and-new-tokens-exceed-length"),
    ):
        with pytest.raises(kind) as raised:
            client.completions.create(**{"model": name, "prompt": "The", **wrong})
        assert raised.value.code == code


def check_chat(server: Server, name: str) -> None:
    client = client_of(server)
    prompt = "user: The quick\nassistant:"
    (expected,) = client.completions.create(
        model=name, prompt=prompt, temperature=0, max_tokens=20
    ).choices
    asked: dict[str, Any] = {
        "model": name,
        "messages": [{"role": "user", "content": "The quick"}],
        "temperature": 0,
        "max_completion_tokens": 20,
    }
    whole = client.chat.completions.create(logprobs=True, top_logprobs=3, **asked)
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == expected.finish_reason
    assert whole.usage is not None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == whole.usage.completion_tokens == 20
    assert all(each.token == each.top_logprobs[0].token for each in choice.logprobs.content)
    stop = expected.text[4:7]
    (choice,) = client.chat.completions.create(stop=[stop], **asked).choices
    assert choice.message.content == expected.text[: expected.text.find(stop)]
    assert choice.finish_reason == "stop"

    hot = {**asked, "temperature": 100, "n": 2, "seed": 7}
    texts = [each.message.content for each in client.chat.completions.create(**hot).choices]
    parts = ["", ""]
    usage = None
    with client.chat.completions.stream(**hot, stream_options={"include_usage": True}) as stream:
        for event in stream:
            if event.type == "chunk":
                for each in event.chunk.choices:
                    parts[each.index] += each.delta.content or ""
                usage = event.chunk.usage or usage
    assert parts == texts
    assert usage is not None
    assert usage.completion_tokens == 40

    for wrong, code in (
        ({"messages": [{"role": "tool", "content": "x"}]}, "chat-template-failed"),
        ({"messages": []}, "request-value-invalid"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "request-value-invalid"),
        ({"max_tokens": 64, "max_completion_tokens": None}, "prompt-and-new-tokens-exceed-length"),
    ):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**{**asked, **wrong})  # type: ignore[arg-type]
        assert raised.value.code == code
    with pytest.raises(openai.NotFoundError, match=r"POST .*/v1/chat/completions"):
        client.embeddings.create(model=name, input="x")


def check_echo(server: Server, name: str) -> None:
    client = client_of(server)
    asked: dict[str, Any] = {"prompt": PROMPTS, "echo": True, "logprobs": 1, "temperature": 0}
    whole = client.completions.create(model=name, max_tokens=5, **asked)
    texts = [""] * len(PROMPTS)
    tokens = [list[str]() for _ in PROMPTS]
    for event in client.completions.create(model=name, max_tokens=5, stream=True, **asked):
        for each in event.choices:
            texts[each.index] += each.text
            assert each.logprobs is not None
            tokens[each.index] += each.logprobs.tokens or []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs and choice.logprobs.tokens for choice in whole.choices]


def check_bad_requests(server: Server, name: str) -> None:
    """They get an answer of their own, and others theirs."""
    path = "/v1/completions"
    good = {"prompt": "The", "temperature": 0, "max_tokens": 30}
    expected = server.send("POST", path, json.dumps(good).encode())[1]["choices"]
    bad = [
        b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"nul\0", b'{"prompt": NaN}', b"{}",
        b'{"prompt": ' + b"[" * 100_000, b'{"prompt": 5}', b'{"prompt": "A", "prompt": "B"}',
        b'{"prompt": "A", "n": 1e9}', b'{"prompt": "A", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": [1, 1e400]}', b'{"prompt": "' + b"x" * 9 * 2**20 + b'"}',
        b'{"prompt": "\\ud800"}', b'{"prompt": ["A"], "stop": [[]]}',
    ]  # fmt: skip
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(server.send, "POST", path, json.dumps(good).encode())]
        for body in bad:
            asked.append(pool.submit(server.send, "POST", path, json.dumps(good).encode()))
            status, response = server.send("POST", path, body)
            assert status == 400, body[:40]
            assert response["error"]["message"]
        for answer in asked:
            status, response = answer.result(DEADLINE)
            assert (status, response["choices"]) == (200, expected)


def check_harness(server: Server, name: str, trained: Path, exported: Path) -> None:
    """The harness has the same results through the server as from the model itself."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from megatron_ds.evaluation.harness import HarnessModel

    theirs = LocalCompletionsAPI(
        base_url=f"http://127.0.0.1:{server.port}/v1/completions",
        tokenizer_backend="huggingface",
        pretrained=name,
        tokenizer=str(exported),
        max_length=MAX_LENGTH,
        batch_size=3,
        num_concurrent=2,
        seed=1,
    )
    pairs = [(prompt, ending) for prompt in PROMPTS for ending in (" fox", " jumps over", "€")]
    pairs.append(("", "The"))
    until = {"until": ["o", "\n"], "max_gen_toks": 12, "do_sample": False}
    asked = {
        "loglikelihood": pairs,
        "loglikelihood_rolling": [(prompt,) for prompt in PROMPTS],
        "generate_until": [(prompt, until) for prompt in PROMPTS],
    }
    arguments = {"load": str(trained), "fp32": True}
    ours = HarnessModel.create_from_arg_obj(arguments, {"batch_size": 2, "device": None})
    try:
        for kind, given in asked.items():
            instances = [Instance(kind, {}, each, number) for number, each in enumerate(given)]
            expected = getattr(ours, kind)(instances)
            answers = getattr(theirs, kind)(instances)
            if kind == "loglikelihood":
                assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
                answers, expected = ([value for value, _ in each] for each in (answers, expected))
            exact = kind == "generate_until"
            assert answers == (expected if exact else pytest.approx(expected, abs=1e-4))
    finally:
        ours.close()


def test_clients_of_completions(
    trained: Path, exported: Path, launcher: Launcher, running: list[Server],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """Claim (serving): OpenAI's client, for completions and chats, and lm-evaluation-harness's
    model for such servers work, the latter with the log-likelihoods of our adapter"""
    chat = tmp_path / "tokenizer"
    chat.mkdir()
    shutil.copy(GOLDEN / "tokenizer.json", chat)
    settings = {"chat_template": CHAT, "eos_token": "<|endoftext|>"}
    (chat / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = {"tokenizer_type": "HFTokenizer", "tokenizer_model": chat}
    server = Server(launcher, trained, 1, served_model_name="parrot", **tokenizer)
    running.append(server)
    name = server.send("GET", "/info")[1]["name"]
    assert name == "parrot"
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    check_openai_client(server, name)
    check_chat(server, name)
    check_echo(server, name)
    check_bad_requests(server, name)
    check_harness(server, name, trained, exported)
    assert "Traceback" not in server.run.output


def test_limits_of_a_busy_server(
    trained: Path, launcher: Launcher, running: list[Server], tmp_path: Path
) -> None:
    """Claim (serving): a busy server refuses what is too much, too late or broken, and answers the
    rest"""
    keys = tmp_path / "keys"
    keys.write_text("first\n\nsecond\n", encoding="utf-8")
    limits = {"inference_max_requests": 1, "max_waiting_requests": 1, "request_timeout": 2.5}
    server = Server(launcher, trained, 1, **limits, api_key_file=keys)
    running.append(server)
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "third").models.list()
    client = client_of(server, "second")
    name = client.models.list().data[0].id
    ask = client.completions.create
    with pytest.raises(openai.BadRequestError, match="POST /v1/completions") as unknown:
        client.chat.completions.create(model=name, messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "chat-template-missing"

    def metric(name: str) -> float:
        """The sum over all labels."""
        url = f"http://127.0.0.1:{server.port}/metrics"
        request = urllib.request.Request(url, headers={"Authorization": "Bearer first"})
        with urllib.request.urlopen(request, timeout=DEADLINE) as response:
            lines = response.read().decode().splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith(f"megatron_ds_{name}")
        )

    def is_idle() -> bool:
        return not server.is_busy()

    # A client that goes away frees the slot.
    stream = ask(model=name, stream=True, **LONG)
    next(iter(stream))
    stream.close()
    server.run.wait_until(is_idle)
    body = json.dumps({**LONG, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first\r\n"
    for _ in range(10):  # before a token is there
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    server.run.wait_until(lambda: metric("responses_total") == 12 and is_idle())
    assert ask(model=name, prompt="The", max_tokens=5, temperature=0).choices[0].text

    with ThreadPoolExecutor(2) as pool:
        late = [pool.submit(lambda: list(ask(model=name, stream=True, **LONG)))]
        server.run.wait_until(server.is_busy)
        server.run.wait_until(lambda: metric("requests_waiting") == 0)
        late.append(pool.submit(ask, model=name, **LONG))
        server.run.wait_until(lambda: server.send("GET", "/health")[1]["requests"] == 2)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(model=name, prompt="The", max_tokens=1)
        assert refused.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError):  # not queued
            ask(model=name, prompt="The", max_tokens=1, temperature=-1)
        with pytest.raises(openai.APIError, match="did not end within"):
            late[0].result(DEADLINE)
        with pytest.raises(openai.InternalServerError, match="did not end within") as raised:
            late[1].result(DEADLINE)
        assert raised.value.status_code == 504
    assert ask(model=name, prompt="The", max_tokens=5, temperature=0).choices[0].text
    assert "Traceback" not in server.run.output


def test_transformers_serves_an_exported_checkpoint_alike(
    trained: Path, exported: Path, launcher: Launcher, running: list[Server]
) -> None:
    """Claim (serving): `transformers serve --continuous-batching` on an exported checkpoint writes
    the same greedy texts"""
    port = free_port()
    options = {"port": port, "device": "cpu", "continuous_batching": True}
    limits = {"cb_num_blocks": 32, "cb_max_batch_tokens": 64}
    words = ["serve", str(exported)]
    for field, value in {**options, **limits}.items():
        words += [f"--{field.replace('_', '-')}", *([] if value is True else [str(value)])]
    theirs = launcher.start(
        words, script=PROGRAMS / "transformers", environment={"HF_HUB_OFFLINE": "1"}
    )
    server = Server(launcher, trained, 1)
    running.append(server)

    def is_up() -> bool:
        try:
            with urllib.request.urlopen(f"http://localhost:{port}/health", timeout=DEADLINE):
                return True
        except OSError:
            return False

    theirs.wait_until(is_up, interval=0.1)
    other = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
    ours = client_of(server)

    def text(client: openai.OpenAI, model: str, prompt: str) -> str:
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
        return client.completions.create(model=model, prompt=prompt, **fields).choices[0].text

    name = ours.models.list().data[0].id
    with ThreadPoolExecutor(len(PROMPTS)) as pool:  # both batch the requests
        expected = list(pool.map(lambda prompt: text(other, str(exported), prompt), PROMPTS))
        assert list(pool.map(lambda prompt: text(ours, name, prompt), PROMPTS)) == expected
    assert len(set(expected)) == len(PROMPTS)
    assert "CB: True" in theirs.output
    os.kill(theirs.pids[0], signal.SIGTERM)
    theirs.wait()
