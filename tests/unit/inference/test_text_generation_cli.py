"""The client, with a fake server."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from megatron_ds.inference import client as text_generation_cli
from tests.problems import printed_codes
from tests.unit.conftest import Run

TOOL = text_generation_cli


class FakeServer(HTTPServer):
    """Records its requests."""

    response: tuple[int, bytes] = (200, b"")

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, Any]] = []
        self.states = 0


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.server.states += 1
        self.send_error(404)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, json.loads(body)))
        status, answer = self.server.response
        if not status:
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, run: Run) -> Run:
    """Runs the tool with an address and typed lines. Returns what it prints."""

    def run_client(address: str, *lines: str, status: int = 0) -> Any:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run(address, status=status)

    return run_client


def test_prompts_are_sent_and_responses_printed(server: FakeServer, client: Run) -> None:
    server.response = (200, json.dumps({"text": ["héllo\nthere"]}).encode())

    printed = client(server.address, "hé", "5", "hé", "__import__('os')", "x", "-1").out

    assert server.requests == [("/api", {"prompts": ["hé"], "tokens_to_generate": 5})]
    assert "Megatron Response:\nhéllo\nthere\n" in printed
    assert "__import__('os')" in printed
    assert "'-1'" in printed


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (400, b'{"message": "too long"}', "Error 400: too long"),
        (500, b'"what"', "Error 500: what"),
        (200, b"<html>", "is not a text generation server"),
        (200, b'{"texts": []}', "is not a text generation server"),
        (200, b"[]", "is not a text generation server"),
    ],
)
def test_errors_are_printed_and_the_next_prompt_is_read(
    status: int, answer: bytes, words: str, server: FakeServer, client: Run
) -> None:
    server.response = (status, answer)
    assert client(server.address, "a", "1", "b", "2").out.count(words) == 2


def test_an_unreachable_server_is_reported_before_a_prompt_is_asked_for(client: Run) -> None:
    printed = client("127.0.0.1:9", "a", "1", status=1)
    assert printed_codes(printed.err) == ["server-not-responding"]
    assert "127.0.0.1:9" in printed.err
    assert printed.out == ""


def test_a_server_that_is_lost_is_reported(server: FakeServer, client: Run) -> None:
    server.response = (0, b"")
    shown = client(server.address, "a", "1", status=1).err
    assert printed_codes(shown) == ["server-not-responding"]
    assert server.states == 1


def test_an_empty_prompt_begins_a_document(server: FakeServer, client: Run) -> None:
    server.response = (200, b'{"text": ["a"]}')
    client(f"http://{server.address}/", "", "5")
    request = {"prompts": [""], "tokens_to_generate": 5, "add_BOS": True}
    assert server.requests == [("/api", request)]


@pytest.mark.parametrize("address", ["127.0.0.1:port", "localhost", "http://localhost/"])
def test_rejects_an_address_without_a_port(address: str, run: Run) -> None:
    assert printed_codes(run(address, status=2).err) == ["invalid-server-address"]
