"""The HTTP server without a model: requests, responses, order, cancellation."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.inference import server
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.server import TextServer, listen
from megatron_ds.inference.tp_group import TpGroupBroken
from tests.problems import raises_problem

Run = Callable[[str, threading.Event], dict[str, Any]]
Read = Callable[[bytes], str]


def read(body: bytes) -> str:
    if body == b"bad":
        raise UserError(Problem.of("bad-request", "this is bad"))
    return body.decode()


def echo(job: str, cancelled: threading.Event) -> dict[str, Any]:
    return {"text": [job]}


class Client:
    """A client of a server in this process, and the server's log."""

    def __init__(
        self,
        run: Run,
        read: Read = read,
        hosts: Collection[str] | None = None,
        info: dict[str, Any] | None = None,
    ) -> None:
        self.log: list[str] = []
        self.server = TextServer[str](read, run, self.log.append, hosts, info)
        self.http = TestClient(self.server.app)

    def put(self, body: bytes) -> tuple[int, Any]:
        response = self.http.put("/api", content=body)
        return response.status_code, response.json()


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_request_is_answered(method: str) -> None:
    response = Client(echo).http.request(method, "/api", content="é".encode())

    assert (response.status_code, response.json()) == (200, {"text": ["é"]})
    assert response.headers["content-type"] == "application/json"


def test_an_invalid_request_is_explained() -> None:
    assert Client(echo).put(b"bad") == (400, {"message": "this is bad", "codes": ["bad-request"]})


def test_a_long_body_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 10)
    client = Client(echo)

    assert client.put(b"x" * 10)[0] == 200
    status, response = client.put(b"x" * 11)
    assert (status, response["codes"]) == (400, ["request-too-long"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/api", 405), ("PUT", "/", 405), ("PUT", "/apis", 404), ("GET", "/docs", 404)],
)
def test_other_requests_are_answered_in_json(method: str, path: str, status: int) -> None:
    response = Client(echo).http.request(method, path)
    assert response.status_code == status
    assert path in response.json()["message"]


def test_health_and_page() -> None:
    info = {"name": "<b>", "defaults": {"temperature": 1.0}}
    client = Client(echo, info=info).http

    assert client.get("/health").json() == {"status": "ok", "requests": 0}
    assert client.get("/info").json() == info
    for path in ("/", "/health", "/info"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    # Texts of users and models are never HTML.
    assert 'method: "PUT"' in page.text
    assert "innerHTML" not in page.text
    for path in re.findall(r'fetch\("(\w+)"', page.text):
        assert client.get(f"/{path}").status_code != 404


def test_a_failed_request_does_not_stop_the_server() -> None:
    def run(job: str, cancelled: threading.Event) -> dict[str, Any]:
        if job == "divide":
            return {"text": 1 / 0}
        if job == "diverged":
            raise UserError(Problem.of("some-code", "not finite"))
        return {"text": float("nan")} if job == "nan" else echo(job, cancelled)

    client = Client(run)

    assert client.put(b"divide") == (500, {"message": "ZeroDivisionError: division by zero"})
    assert "Traceback" in client.log[0]
    assert client.put(b"diverged") == (500, {"message": "not finite"})
    assert "Traceback" not in client.log[1]
    assert (client.put(b"nan")[0], client.put(b"well")) == (500, (200, {"text": ["well"]}))


def test_requests_run_one_after_another() -> None:
    running = threading.Lock()

    def run(job: str, cancelled: threading.Event) -> dict[str, Any]:
        assert running.acquire(blocking=False)
        threading.Event().wait(0.02)
        running.release()
        return echo(job, cancelled)

    client = Client(run)
    with client.http, ThreadPoolExecutor(6) as pool:
        responses = list(pool.map(client.put, [b"%d" % number for number in range(6)]))

    assert responses == [(200, {"text": [str(number)]}) for number in range(6)]


def test_an_invalid_request_is_answered_immediately() -> None:
    started, release = threading.Event(), threading.Event()

    def run(job: str, cancelled: threading.Event) -> dict[str, Any]:
        started.set()
        assert release.wait(60)
        return echo(job, cancelled)

    client = Client(run)
    many = 40  # more than the server has threads that read requests
    with client.http, ThreadPoolExecutor(many) as pool:
        slow = [pool.submit(client.put, b"slow") for _ in range(many)]
        try:
            assert started.wait(60)
            while client.http.get("/health").json()["requests"] < many:
                assert not any(response.done() for response in slow)
            assert client.put(b"bad")[0] == 400
        finally:
            release.set()
        assert all(response.result(60)[0] == 200 for response in slow)


def test_requests_that_are_read_leave_threads_for_generation() -> None:
    running, release, release_reads = (threading.Event() for _ in range(3))

    def slow_read(body: bytes) -> str:
        assert body != b"long" or release_reads.wait(60)
        return read(body)

    def run(job: str, cancelled: threading.Event) -> dict[str, Any]:
        running.set()
        assert release.wait(60)
        return echo(job, cancelled)

    client = Client(run, slow_read)
    many = 40  # more than asyncio's pool has threads
    with client.http, ThreadPoolExecutor(many + 2) as pool:
        try:
            first = pool.submit(client.put, b"first")
            assert running.wait(60)
            second = pool.submit(client.put, b"second")
            while client.http.get("/health").json()["requests"] < 2:
                pass
            reads = [pool.submit(client.put, b"long") for _ in range(many)]
            release.set()
            assert first.result(60)[0] == second.result(60)[0] == 200
            assert not any(each.done() for each in reads)
        finally:
            release.set()
            release_reads.set()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:5000"}, 200),
        ({"Host": "[::1]:5000"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "proxy.example"}, 200),
        ({"Host": "localhost:1", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "localhost", "Origin": "https://proxy.example"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost.evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost@evil.example"}, 403),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
    ],
)
def test_web_pages_of_other_sites_are_rejected(headers: dict[str, str], status: int) -> None:
    client = Client(echo, hosts=["127.0.0.1", "Proxy.example"])
    for method, path in (("PUT", "/api"), ("POST", "/api"), ("GET", "/"), ("GET", "/health")):
        response = client.http.request(method, path, headers=headers, content=b"")
        assert response.status_code == status
        assert status == 200 or set(response.json()) == {"message"}


def test_incomplete_requests_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.3)
    complete = b"PUT /api HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
    sent = {
        (b"",): b"",
        (b"PUT /api HTTP/1.1\r\nHost",): b"",
        (complete, b"PUT /api"): b"200",
        (complete[:-1],): b"408",
    }
    text_server = Client(echo).server

    def status_until_the_end(port: int, parts: tuple[bytes, ...]) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            received = b""
            for part in parts:
                connection.sendall(part)
                received += connection.recv(4096)
            while more := connection.recv(4096):
                received += more
            return received[9:12]

    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(len(sent) + 1) as pool:
        port = listener.getsockname()[1]
        ends = [pool.submit(status_until_the_end, port, data) for data in sent]

        def stop() -> None:
            for end in ends:
                end.exception()
            os.kill(os.getpid(), signal.SIGTERM)

        pool.submit(stop)
        text_server.run(listener)
        assert [end.result() for end in ends] == list(sent.values())


def test_ranks_out_of_step_stop_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(job: str, cancelled: threading.Event) -> dict[str, Any]:
        raise TpGroupBroken("rank 1 is lost")

    signals: list[int] = []
    monkeypatch.setattr(server.signal, "raise_signal", signals.append)

    status, response = Client(run).put(b"x")

    assert status == 500
    assert "rank 1 is lost" in response["message"]
    assert signals == [server.signal.SIGTERM]


def test_stopping_the_server_cancels_a_request() -> None:
    started = threading.Event()

    def run(job: str, cancelled: threading.Event) -> dict[str, Any]:
        started.set()
        assert cancelled.wait(60)
        raise Cancelled

    client = Client(run)
    with client.http, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.put, b"slow")
        assert started.wait(60)
        client.server.stop()
        assert slow.result(60)[0] == 503


def test_an_unusable_address_is_reported() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "203.0.113.7", "a..b"):
            with raises_problem("server-address-unusable", "host", "port", contains=f" {port}: "):
                listen(host, port)
