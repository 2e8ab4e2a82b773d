"""HTTP: what comes in, what goes out, one at a time; no model."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from megatron_ds.inference import server
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.server import TextServer, listen
from megatron_ds.inference.tp_group import TpGroupBroken

Perform = Callable[[str, threading.Event], dict[str, Any]]


def read(body: bytes) -> str:
    if body == b"bad":
        raise ValueError("this is bad")
    return body.decode()


def echo(job: str, cancelled: threading.Event) -> dict[str, Any]:
    return {"text": [job]}


class Asked:
    """A server in this process, and its log."""

    def __init__(self, perform: Perform) -> None:
        self.log: list[str] = []
        self.server = TextServer[str](read, perform, self.log.append)
        self.client = TestClient(self.server.app)

    def put(self, body: bytes) -> tuple[int, Any]:
        response = self.client.put("/api", content=body)
        return response.status_code, response.json()


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_an_answer(method: str) -> None:
    response = Asked(echo).client.request(method, "/api", content="é".encode())

    assert response.status_code == 200
    assert response.json() == {"text": ["é"]}
    assert response.headers["content-type"] == "application/json"


def test_a_bad_request_says_why() -> None:
    assert Asked(echo).put(b"bad") == (400, {"message": "this is bad"})


def test_a_body_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 10)
    asked = Asked(echo)

    assert asked.put(b"x" * 10)[0] == 200
    assert asked.put(b"x" * 11) == (400, {"message": "the body is longer than 10 bytes"})


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "/api", 405, "GET does not go with /api; requests go to PUT /api"),
        ("PUT", "/", 405, "PUT does not go with /"),
        ("PUT", "/apis", 404, "there is no /apis; requests go to PUT /api"),
        ("GET", "/docs", 404, "there is no /docs"),
    ],
)
def test_other_requests_are_answered_in_json(
    method: str, path: str, status: int, words: str
) -> None:
    response = Asked(echo).client.request(method, path)
    assert response.status_code == status
    assert words in response.json()["message"]


def test_health_and_page() -> None:
    client = Asked(echo).client

    assert client.get("/health").json() == {"status": "ok", "requests": 0}
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert 'method: "PUT"' in page.text


def test_a_failing_request_is_told_and_the_next_one_answered() -> None:
    def perform(job: str, cancelled: threading.Event) -> dict[str, Any]:
        if job == "divide":
            return {"text": 1 / 0}
        return {"text": float("nan")} if job == "nan" else echo(job, cancelled)

    asked = Asked(perform)

    assert asked.put(b"divide") == (500, {"message": "ZeroDivisionError: division by zero"})
    assert "Traceback" in asked.log[0]
    assert asked.put(b"nan")[0] == 500
    assert asked.put(b"well") == (200, {"text": ["well"]})


def test_requests_are_performed_one_after_another() -> None:
    at_once: list[int] = []
    now = threading.Semaphore(1)

    def perform(job: str, cancelled: threading.Event) -> dict[str, Any]:
        alone = now.acquire(blocking=False)
        at_once.append(alone)
        threading.Event().wait(0.02)
        if alone:
            now.release()
        return echo(job, cancelled)

    asked = Asked(perform)
    with asked.client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(asked.put, [b"%d" % number for number in range(6)]))

    assert at_once == [True] * 6
    assert answers == [(200, {"text": [str(number)]}) for number in range(6)]


def test_a_bad_request_does_not_wait_for_its_turn() -> None:
    started, release = threading.Event(), threading.Event()

    def perform(job: str, cancelled: threading.Event) -> dict[str, Any]:
        started.set()
        assert release.wait(60)
        return echo(job, cancelled)

    asked = Asked(perform)
    many = 40  # more than there are threads to read requests
    with asked.client, ThreadPoolExecutor(many) as pool:
        slow = [pool.submit(asked.put, b"slow") for _ in range(many)]
        assert started.wait(60)
        while asked.client.get("/health").json()["requests"] < many:
            pass
        assert asked.put(b"bad")[0] == 400
        release.set()
        assert all(each.result(60)[0] == 200 for each in slow)


@pytest.fixture
def raised_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    numbers: list[int] = []
    monkeypatch.setattr(server.signal, "raise_signal", numbers.append)
    return numbers


def test_ranks_out_of_step_end_the_server(raised_signals: list[int]) -> None:
    def perform(job: str, cancelled: threading.Event) -> dict[str, Any]:
        raise TpGroupBroken("rank 1 is gone")

    asked = Asked(perform)

    assert asked.put(b"x") == (500, {"message": "the server ends: rank 1 is gone"})
    assert raised_signals == [server.signal.SIGTERM]


def test_a_request_is_cancelled_when_the_server_stops() -> None:
    started = threading.Event()

    def perform(job: str, cancelled: threading.Event) -> dict[str, Any]:
        started.set()
        assert cancelled.wait(60)
        raise Cancelled

    asked = Asked(perform)
    with asked.client, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(asked.put, b"slow")
        assert started.wait(60)
        asked.server.stop()
        assert slow.result(60) == (503, {"message": "the server is stopping"})


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--host 127.0.0.1 --port {port}: .*in use"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.7", "a..b"])
def test_a_host_that_is_not_here_is_named(host: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--host {host} --port 5000: ")):
        listen(host, 5000)
