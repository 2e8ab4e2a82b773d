"""The HTTP server under clients that leave, and under exceptions that end programs."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import select
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_ds.inference.serving import server, stop_signals, watchdog, worker_thread
from megatron_ds.inference.serving.scheduler import Event, Finished, NewToken
from megatron_ds.inference.serving.server import listen
from tests.unit.inference.schedulers import DEADLINE, wait_until
from tests.unit.inference.test_server import Client, Job, finished

BUSY_S = 0.02
LEAVING_S = 1.5
"""Duration of the clients that leave."""
REQUEST = b"PUT /api HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"


def stream(job: Job, listener: Callable[[Event], None]) -> None:
    for number in (5, 6) if job.stream else ():
        listener(NewToken(0, number, None, []))
    listener(finished(2))


@contextmanager
def serving(client: Client) -> Iterator[tuple[str, int]]:
    """The address of a server in the main thread of this process, as clients in a thread see it."""
    with listen("127.0.0.1", 0) as listener:
        yield listener.getsockname()[:2]
        client.server.run(listener)


def answer_of(address: tuple[str, int], body: bytes) -> bytes:
    """The complete answer to a request."""
    with socket.create_connection(address, timeout=DEADLINE) as connection:
        connection.sendall(REQUEST % (len(body), body))
        return b"".join(iter(lambda: connection.recv(4096), b""))


def test_clients_that_leave_cost_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim (serving): clients that leave at any moment cost no other client an answer"""
    monkeypatch.setattr(worker_thread, "MAX_THREADS", 4)
    monkeypatch.setattr(worker_thread, "IDLE_S", 0.1)
    client = Client(stream)

    def end_slowly(finished: Finished) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + BUSY_S
        while time.monotonic() < end:
            pass
        yield {"end": 1}

    client.api.of_end = end_slowly  # type: ignore[method-assign]
    until = time.monotonic() + LEAVING_S

    def leave(address: tuple[str, int], seed: int) -> int:
        rng = random.Random(seed)
        count = 0
        while time.monotonic() < until:
            with socket.create_connection(address, timeout=DEADLINE) as connection:
                connection.sendall(REQUEST % (6, b"stream"))
                time.sleep(rng.uniform(0, 3 * BUSY_S))
            count += 1
        return count

    def stay(address: tuple[str, int], body: bytes) -> list[bytes]:
        answers = []
        while time.monotonic() < until:
            answers.append(answer_of(address, body))
        return answers

    def attack(address: tuple[str, int]) -> tuple[int, list[bytes], list[bytes], int]:
        try:
            with ThreadPoolExecutor(7) as pool:
                left = [pool.submit(leave, address, seed) for seed in range(4)]
                streams = [pool.submit(stay, address, b"stream") for _ in range(2)]
                others = pool.submit(stay, address, b"x")
                answers = [answer for each in streams for answer in each.result(DEADLINE)]
                count = sum(each.result(DEADLINE) for each in left)
            wait_until(lambda: "reader" not in [each.name for each in threading.enumerate()])
            with urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/health") as response:
                return count, answers, others.result(), response.status
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool, serving(client) as address:
        done = pool.submit(attack, address)
    count, streams, others, health = done.result(DEADLINE)
    assert count > 5
    assert len(streams) > 2
    for answer in streams:
        assert b" 200 " in answer.partition(b"\r\n")[0]
        assert b'data: {"end": 1}' in answer
        assert b"[DONE]" in answer
    assert others
    assert {answer.partition(b"\r\n\r\n")[2] for answer in others} == {b'{"text":["x"]}'}
    assert health == 200
    assert not any("Traceback" in line for line in client.log)


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_server_that_ends_by_itself_has_failed(error: BaseException) -> None:
    """Claim (serving): a server whose HTTP ends without a signal exits with a failure status"""
    client = Client(stream)

    def fail(token: NewToken) -> Iterator[dict[str, Any]]:
        raise error

    client.api.of_token = fail  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError) as raised, serving(client) as address:
            asked = pool.submit(answer_of, address, b"stream")
        assert raised.value.__cause__ is error
        asked.exception(DEADLINE)
    assert client.backend.stopped.is_set()


def test_exceptions_while_a_request_is_read_are_its_own() -> None:
    """Also those that end programs, as libraries in other languages raise them."""
    client = Client()

    def exit_program(body: bytes) -> Job:
        raise SystemExit(0)

    read = client.api.read
    with client.http:
        client.api.read = exit_program  # type: ignore[method-assign]
        status, response = client.put(b"x")
        assert (status, "SystemExit" in response["message"]) == (500, True)
        assert "exit_program" in client.log[0]
        client.api.read = read  # type: ignore[method-assign]
        assert client.put(b"x") == (200, {"text": ["x"]})


def test_the_watchdog_waits_for_no_number_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The served process may read it between the watchdog's two calls."""
    receiving, sending = socket.socketpair()
    command, commanding = os.pipe()
    monkeypatch.setattr(watchdog, "COMMANDS", command)
    wait = select.select

    def read_in_between(watched: list[Any], *others: Any) -> tuple[list[Any], ...]:
        monkeypatch.setattr(watchdog.select, "select", wait)
        os.write(commanding, b"x")
        return [receiving], [], []

    monkeypatch.setattr(watchdog.select, "select", read_in_between)
    receiving.settimeout(None)
    threads = ThreadPoolExecutor(1)
    try:
        waiting = threads.submit(watchdog.wait_for_signal, receiving)
        assert waiting.result(DEADLINE)
    finally:
        sending.send(b"x")  # ends a call that waits
        threads.shutdown()
        for descriptor in command, commanding:
            os.close(descriptor)
        receiving.close()
        sending.close()


@pytest.mark.parametrize("is_before", [True, False], ids=["before the signal", "after it"])
def test_a_signal_ends_the_process_though_a_call_holds_the_lock(
    is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): SIGTERM ends the server though a call holds the interpreter's lock"""
    monkeypatch.setattr(server, "EXIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(stop_signals, "KILL_AFTER_S", 0.3)
    context = multiprocessing.get_context("fork")
    reached = context.Event()

    def hold_the_lock(*_: object) -> None:
        reached.set()
        ctypes.PyDLL(None).sleep(int(DEADLINE))

    def serve(listener: socket.socket) -> None:
        client = Client()
        if is_before:
            client.api.read = hold_the_lock  # type: ignore[method-assign, assignment]
        else:
            client.backend.stop = hold_the_lock  # type: ignore[method-assign]
        client.server.run(listener)

    with listen("127.0.0.1", 0) as listener:
        process = context.Process(target=serve, args=(listener,))
        process.start()
        try:
            assert process.pid is not None
            if is_before:
                connection = socket.create_connection(listener.getsockname())
                with connection:
                    connection.sendall(REQUEST % (1, b"x"))
                    assert reached.wait(DEADLINE)
            else:
                answer_of(listener.getsockname(), b"x")
            os.kill(process.pid, signal.SIGTERM)
            process.join(DEADLINE / 2)
            assert process.exitcode == -signal.SIGKILL
        finally:
            process.kill()
            process.join()
