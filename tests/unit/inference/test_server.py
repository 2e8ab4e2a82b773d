"""The HTTP server without a model: requests, responses, limits, cancellation."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.testclient import TestClient

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig, TextSequence
from megatron_ds.inference.generation.tp_group import TpGroupBroken
from megatron_ds.inference.serving import server
from megatron_ds.inference.serving.scheduler import (
    Event,
    Failed,
    Finished,
    NewToken,
    Ticket,
    TimedOut,
    TooManyWaiting,
)
from megatron_ds.inference.serving.server import ServerOptions, TextServer, listen
from tests.problems import raises_problem
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables

TABLES = tables(__file__)


@dataclass(frozen=True)
class Job:
    """The text of a request."""

    text: str
    prompts: Sequence[Sequence[int]] = ((1, 2),)
    log: bool = True

    @property
    def stream(self) -> bool:
        return self.text.startswith("stream")


class EchoApi:
    """Answers with the text of the request, and streams its characters."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def read(self, body: bytes) -> Job:
        if body == b"bad":
            raise UserError(Problem.of("bad-request", "this is bad"))
        while body == b"endless" and not self.released.is_set():
            pass
        if body == b"long":
            self.released.wait(60)
        return Job(body.decode())

    def response(self, job: Job, finished: Finished) -> dict[str, Any]:
        return {"text": [float("nan") if job.text == "nan" else job.text]}

    def events(self, job: Job) -> EchoApi:
        return self

    def of_token(self, token: NewToken) -> Iterator[dict[str, Any]]:
        yield {"token": token.id}

    def of_end(self, finished: Finished) -> Iterator[dict[str, Any]]:
        yield {"end": len(finished.result)}

    def error(self, message: str, status: int, codes: Sequence[str] = ()) -> dict[str, Any]:
        return {"message": message} | ({"codes": list(codes)} if codes else {})


def finished(new: int = 0) -> Finished:
    config = GenerationConfig(9, SamplingParams(), prompt_logprobs=True)
    sequence = TextSequence.of([1, 2], config, 0)
    for token in range(new):
        sequence.append(token)
    return Finished([sequence])


Run = Callable[[Job, Callable[[Event], None]], None]


def echo(job: Job, listener: Callable[[Event], None]) -> None:
    listener(finished(3))


@dataclass
class Backend:
    """Calls a function for each job."""

    start: Run = echo
    generated: int = 7
    prompted: int = 9
    running: int = 0
    waiting: int = 0
    step_s: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)
    cancelled: list[Ticket] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def jobs(self) -> int:
        return len(self.tickets) - len(self.cancelled)

    def submit(self, job: Job, listener: Callable[[Event], None], timeout: float) -> Ticket:
        ticket = Ticket(len(self.tickets), job, listener, timeout)
        self.start(job, listener)
        self.tickets.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def stop(self) -> None:
        self.stopped.set()
        for ticket in self.tickets:
            ticket.listener(Failed(Cancelled()))

    def run(self) -> None:
        assert self.stopped.wait(60)


class Client:
    """A client of a server in this process, and the server's log."""

    def __init__(self, run: Run = echo, **options: Any) -> None:
        self.log: list[str] = []
        self.backend = Backend(run)
        self.api = EchoApi()
        self.server = TextServer(
            self.backend,
            {"/api": self.api, "/v1/completions": self.api},
            self.log.append,
            ServerOptions(**options),
            {"/info": {"name": "<b>", "defaults": {"temperature": 1.0}}},
        )
        self.http = TestClient(self.server.app)

    def put(self, body: bytes, **headers: str) -> tuple[int, Any]:
        response = self.http.put("/api", content=body, headers=headers)
        return response.status_code, response.json()


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_request_is_answered(method: str) -> None:
    response = Client().http.request(method, "/api", content="é".encode())

    assert (response.status_code, response.json()) == (200, {"text": ["é"]})
    assert response.headers["content-type"] == "application/json"


def test_an_invalid_request_is_explained() -> None:
    assert Client().put(b"bad") == (400, {"message": "this is bad", "codes": ["bad-request"]})


def test_a_long_body_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_BODY", 10)
    client = Client()

    assert client.put(b"x" * 10)[0] == 200
    status, response = client.put(b"x" * 11)
    assert (status, response["codes"]) == (400, ["request-too-long"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api", 405),
        ("PUT", "/", 405),
        ("PUT", "/apis", 404),
        ("GET", "/docs", 404),
        ("POST", "/v1/responses", 404),
        ("GET", "/v1/completions", 405),
    ],
)
def test_other_requests_are_answered_in_json(method: str, path: str, status: int) -> None:
    response = Client().http.request(method, path)
    assert response.status_code == status
    content = response.json()
    if path.startswith("/v1/"):  # as OpenAI's clients expect it
        content = content["error"]
        assert content["type"] == "invalid_request_error"
    assert path in content["message"]
    assert status == 405 or "POST /api, /v1/completions" in content["message"]


def test_health_and_page() -> None:
    server = Client()
    client = server.http
    backend = server.backend

    assert client.get("/health").json() == {"status": "ok", "requests": 0}
    backend.step_s = 61
    response = client.get("/health")
    assert (response.status_code, response.json()["requests"]) == (503, 0)
    backend.step_s = 59
    assert client.get("/info").json()["name"] == "<b>"
    for path in ("/", "/health", "/info"):
        head = client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    page = client.get("/")
    assert page.headers["X-Frame-Options"] == "DENY"
    assert page.headers["X-Content-Type-Options"] == "nosniff"
    assert page.headers["content-type"].startswith("text/html")
    # Texts of users and models are never HTML.
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write", page.text)
    # The page loads nothing from elsewhere; the URL is the name of SVG's elements.
    assert re.findall(r"\w+://[^\s\"']+", page.text) == ["http://www.w3.org/2000/svg"]
    assert "default-src 'none'; connect-src 'self'" in page.text
    assert re.findall(r'"(v1/[\w/]+|info)"', page.text) == [
        "v1/chat/completions",
        "v1/completions",
        "info",
    ]


def test_a_failed_request_does_not_stop_the_server() -> None:
    errors = {
        "divide": ZeroDivisionError("division by zero"),
        "diverged": UserError(Problem.of("some-code", "not finite")),
        "slow": TimedOut(),
    }

    def run(job: Job, listener: Callable[[Event], None]) -> None:
        listener(Failed(errors[job.text]) if job.text in errors else finished())

    client = Client(run, timeout=7)

    assert client.put(b"divide") == (500, {"message": "ZeroDivisionError: division by zero"})
    assert "ZeroDivisionError" in client.log[0]
    assert client.put(b"diverged") == (500, {"message": "not finite"})
    assert client.log[1] == "ERROR: not finite"
    assert client.put(b"slow") == (504, {"message": "the request did not end within 7 s"})
    assert (client.put(b"nan")[0], client.put(b"well")) == (500, (200, {"text": ["well"]}))
    assert len(client.backend.cancelled) == len(client.backend.tickets)


@pytest.mark.parametrize("body", [b"endless", b"long"])
def test_a_request_holds_the_reader_no_longer_than_its_deadline(body: bytes) -> None:
    client = Client(timeout=0.3)
    with client.http:
        status, response = client.put(body)
        assert (status, response) == (504, {"message": "the request was not read within 0.3 s"})
        assert client.put(b"well") == (200, {"text": ["well"]})
    client.api.released.set()


@pytest.mark.parametrize("body", [b"x", b"stream"])
def test_a_request_ends_in_time_though_the_model_does_not(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0.0)
    client = Client(lambda job, listener: None, timeout=0.2)
    response = client.http.put("/api", content=body)
    assert response.status_code == (504 if body == b"x" else 200)
    assert "did not end within 0.2 s" in response.text
    assert len(client.backend.cancelled) == 1


def compute_for_hours() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def loop_endlessly() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("step", "number"),
    with_proofs(*rotated((compute_for_hours, loop_endlessly), (signal.SIGTERM, signal.SIGINT))),
)
def test_a_signal_ends_the_process_whatever_it_computes(
    step: Callable[[], None], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): a live server answers requests of any kind in time, is healthy and idle
    afterwards, and ends at a signal whatever it computes"""
    monkeypatch.setattr(server, "EXIT_TIMEOUT_S", 0.5)

    def serve(listener: socket.socket) -> None:
        client = Client(lambda job, listener: None)
        client.backend.run = step  # type: ignore[method-assign]
        client.server.run(listener)

    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        context = multiprocessing.get_context("fork")
        process = context.Process(target=serve, args=(listener,))
        process.start()
        try:
            request = urllib.request.Request(f"{url}/api", b"x")
            with ThreadPoolExecutor(1) as pool:
                pending = pool.submit(urllib.request.urlopen, request, timeout=60)
                while json.load(urllib.request.urlopen(f"{url}/health"))["requests"] < 1:
                    assert not pending.done()
                assert process.pid is not None
                os.kill(process.pid, number)
                with pytest.raises(urllib.error.HTTPError) as raised:
                    pending.result(60)
                assert raised.value.code == 503
            process.join(60)
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join()


def test_bodies_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_HELD_BYTES", 10)
    client = Client()

    def serve_and_ask(listener: socket.socket) -> list[int]:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"

        def status() -> int:
            try:
                with urllib.request.urlopen(url, b"123456", timeout=60) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code if error.headers["Retry-After"] == "1" else 0

        try:
            with socket.create_connection(listener.getsockname()) as slow:
                slow.sendall(b"PUT /api HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n12345")
                while client.server._held_bytes < 5:
                    pass
                assert [status(), status()] == [503, 503]
            while client.server._held_bytes:
                pass
            return [status(), status(), client.server._held_bytes]
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(serve_and_ask, listener)
        client.server.run(listener)
        assert asked.result(60) == [200, 200, 0]


def test_more_requests_than_may_wait_are_told_to_come_back() -> None:
    def full(job: Job, listener: Callable[[Event], None]) -> None:
        raise TooManyWaiting

    client = Client(full)
    response = client.http.put("/api", content=b"x")
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    metrics = client.http.get("/metrics").text
    assert 'megatron_ds_responses_total{path="/api",status="429"} 1.0' in metrics


def test_metrics_count_tokens_and_requests() -> None:
    client = Client()
    client.put(b"x")
    client.put(b"bad")

    response = client.http.get("/metrics")

    assert response.headers["content-type"].startswith("text/plain")
    values = dict(
        line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#")
    )
    assert values["megatron_ds_generated_tokens_total"] == "7.0"
    assert values["megatron_ds_prompt_tokens_total"] == "9.0"
    assert values["megatron_ds_request_seconds_count"] == "1.0"
    assert values['megatron_ds_responses_total{path="/api",status="200"}'] == "1.0"
    assert values['megatron_ds_responses_total{path="/api",status="400"}'] == "1.0"


def test_tokens_are_streamed() -> None:
    def run(job: Job, listener: Callable[[Event], None]) -> None:
        for number in (5, 6):
            listener(NewToken(0, number, None, []))
        listener(Failed(TimedOut()) if job.text == "stream late" else finished(2))

    client = Client(run)

    def events(body: bytes) -> list[Any]:
        response = client.http.put("/api", content=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        return response.text.split("\n\n")[:-1]

    shown = [json.dumps(each) for each in ({"token": 5}, {"token": 6}, {"end": 1})]
    assert events(b"stream") == [*(f"data: {each}" for each in shown), "data: [DONE]"]
    *tokens, last = events(b"stream late")
    assert len(tokens) == 2
    assert "did not end within" in json.loads(last.removeprefix("data: "))["message"]
    assert len(client.backend.cancelled) == 2
    assert "texts: 1 with 2 new tokens" in client.log[0]


def test_keys_protect_all_but_the_page_and_the_state() -> None:
    client = Client(keys=["abc", "déf"])

    for header in ("", "abc", "Bearer", "Bearer ab", "Basic abc", "Bearer abcd"):
        status, response = client.put(b"x", **({"Authorization": header} if header else {}))
        assert (status, set(response)) == (401, {"message"})
        assert client.http.get("/info", headers={"Authorization": header}).status_code == 401
    assert client.http.get("/metrics").status_code == 401
    for key in ("abc", "déf"):
        headers = [(b"Authorization", f"bearer {key}".encode())]
        assert client.http.put("/api", content=b"x", headers=headers).status_code == 200
    assert client.http.get("/").status_code == client.http.get("/health").status_code == 200


def test_an_invalid_request_is_answered_while_others_run() -> None:
    client = Client(lambda job, listener: None)
    many = 40  # more than the server has threads that read requests
    with client.http, ThreadPoolExecutor(many) as pool:
        slow = [pool.submit(client.put, b"slow") for _ in range(many)]
        try:
            while client.http.get("/health").json()["requests"] < many:
                assert not any(response.done() for response in slow)
            assert client.put(b"bad")[0] == 400
        finally:
            for ticket in client.backend.tickets:
                ticket.listener(finished())
        assert all(response.result(60)[0] == 200 for response in slow)


@pytest.mark.parametrize(("headers", "status"), TABLES["headers"])
def test_web_pages_of_other_sites_are_rejected(headers: dict[str, str], status: int) -> None:
    """Claim (serving): a server of one machine rejects requests of web pages of other sites"""
    client = Client(hosts=["127.0.0.1", "Proxy.example"])
    for method, path in (("PUT", "/api"), ("POST", "/api"), ("GET", "/"), ("GET", "/health")):
        response = client.http.request(method, path, headers=headers, content=b"")
        assert response.status_code == status
        assert status == 200 or set(response.json()) == {"message"}


@pytest.mark.parametrize("origins", [["https://chat.example"], ["*"]])
def test_pages_of_allowed_sites_may_send_requests(origins: list[str]) -> None:
    client = Client(hosts=["127.0.0.1"], origins=origins, keys=["abc"]).http
    site = {"Host": "localhost", "Origin": "https://chat.example"}
    asked = {"Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": "authorization, content-type"}
    allowed = client.options("/v1/completions", headers={**site, **asked})
    assert allowed.status_code == 200
    sent = {**site, "Authorization": "Bearer abc"}
    answer = client.post("/v1/completions", headers=sent, content=b"x")
    assert answer.status_code == 200
    for response in (allowed, answer, client.get("/v1/completions", headers=site)):
        assert response.headers["Access-Control-Allow-Origin"] in ("*", "https://chat.example")
    other = client.post("/v1/completions", headers={**sent, "Origin": "https://evil.example"})
    assert other.status_code == (200 if origins == ["*"] else 403)
    # The host is checked even so, because of DNS rebinding.
    rebound = client.post("/v1/completions", headers={**sent, "Host": "chat.example"})
    assert rebound.status_code == 403
    assert "--allowed-hosts" in rebound.json()["error"]["message"]


def test_incomplete_requests_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim (serving): prompts that are too long are rejected before they are tokenized, and
    incomplete requests are ended"""
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.3)
    complete = b"PUT /api HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
    sent = {(complete[:-1],): b"408"}
    text_server = Client().server

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


def test_a_disconnected_client_cancels_its_request() -> None:
    client = Client(lambda job, listener: None)
    body = b"PUT /api HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:

        def disconnect() -> None:
            for text in (b"slow", b"stream"):
                with socket.create_connection(listener.getsockname()) as connection:
                    connection.sendall(body % (len(text), text))
                    while not client.backend.jobs:
                        pass
                while client.backend.jobs:
                    pass
            os.kill(os.getpid(), signal.SIGTERM)

        done = pool.submit(disconnect)
        client.server.run(listener)
        done.result(60)
    assert len(client.backend.cancelled) == 2


def test_ranks_out_of_step_stop_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(lambda job, listener: listener(Failed(TpGroupBroken("rank 1 is lost"))))

    def run() -> None:
        raise TpGroupBroken("rank 1 is lost")

    client.backend.run = run  # type: ignore[method-assign]
    status, response = client.put(b"x")

    assert status == 500
    assert "rank 1 is lost" in response["message"]
    with listen("127.0.0.1", 0) as listener, pytest.raises(TpGroupBroken):
        client.server.run(listener)


def test_stopping_the_server_cancels_a_request() -> None:
    client = Client(lambda job, listener: None)
    with client.http, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(client.put, b"slow")
        while not client.backend.tickets:
            pass
        client.backend.stop()
        assert slow.result(60)[0] == 503


def test_an_unusable_address_is_reported() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "203.0.113.7", "a..b"):
            with raises_problem("server-address-unusable", "host", "port", contains=f" {port}: "):
                listen(host, port)
