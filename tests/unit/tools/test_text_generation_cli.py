"""The client: what it sends to a server that answers as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from tools import text_generation_cli as tool


class Told(HTTPServer):
    """Keeps what it was asked."""

    answer: tuple[int, bytes] = (200, b"")

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Told

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, json.loads(body)))
        status, answer = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Told]:
    with Told() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def typed(monkeypatch: pytest.MonkeyPatch, address: str, *lines: str) -> int:
    waiting = list(lines)

    def answer(question: str) -> str:
        if not waiting:
            raise EOFError
        return waiting.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    return tool.main([address])


def test_prompts_are_sent_and_answers_printed(
    server: Told, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = (200, json.dumps({"text": ["héllo\nthere"]}).encode())
    address = f"127.0.0.1:{server.server_port}"

    assert typed(monkeypatch, address, "hé", "5", "hé", "__import__('os')", "x", "-1") == 0

    assert server.asked == [("/api", {"prompts": ["hé"], "tokens_to_generate": 5})]
    printed = capsys.readouterr().out
    assert "Megatron Response:\nhéllo\nthere\n" in printed
    assert "\"__import__('os')\" is no number of tokens" in printed
    assert "'-1' is no number of tokens" in printed


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (400, b'{"message": "too long"}', "Error 400: too long"),
        (500, b'"what"', "Error 500: what"),
        (200, b"<html>", "is no text generation server"),
        (200, b'{"texts": []}', "is no text generation server"),
        (200, b"[]", "is no text generation server"),
    ],
)
def test_errors_are_told_and_the_next_prompt_asked(
    status: int,
    answer: bytes,
    words: str,
    server: Told,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answer = (status, answer)
    assert typed(monkeypatch, f"127.0.0.1:{server.server_port}", "a", "1", "b", "2") == 0
    assert capsys.readouterr().out.count(words) == 2


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(monkeypatch, "127.0.0.1:9", "a", "1") == 0
    assert "no answer from http://127.0.0.1:9/api" in capsys.readouterr().out


def test_a_wrong_address_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        tool.main(["127.0.0.1:port"])
    assert end.value.code == 2
    assert "is no HOST:PORT" in capsys.readouterr().err
