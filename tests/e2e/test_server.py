"""The text generation server on one and on two ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.inference.serving.api_schema import Defaults
from tests.e2e.runs import DEADLINE, Launcher, Settings
from tests.e2e.servers import Server

LONG: dict[str, Any] = {"prompts": ["1 2 3"] * 128, "tokens_to_generate": 29}
"""Hundreds of forward passes with four texts at a time."""


@pytest.fixture(scope="module")
def trained(launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    schedule = {"train_iters": 2, "global_batch_size": 4}
    launcher.start({**base, **schedule, "save": folder}).succeed()
    return folder


REQUESTS: list[dict[str, Any]] = [
    {"prompts": ["1 2 3", "7"], "tokens_to_generate": 9, "random_seed": 3, "temperature": 2.0},
    {"prompts": ["1 2 3"], "random_seed": 4, "top_p": 0.9, "top_p_decay": 0.9, "add_BOS": True},
    {"prompts": ["1 2 3"], "tokens_to_generate": 3, "beam_width": 4},
]


def test_two_ranks_respond_like_one_process(
    trained: Path, launcher: Launcher, running: list[Server]
) -> None:
    """Claim (serving): a server on two processes responds like one on one process"""
    sizes = {"num_layers": 2, "hidden_size": 32, "pipeline_model_parallel_size": 1}
    alone = Server(launcher, trained, 1, **sizes, seed=1)
    pair = Server(launcher, trained, 2, tensor_model_parallel_size=2, seed=1)
    running += [alone, pair]

    for fields in REQUESTS:
        status, first = alone.put(fields)
        _, second = pair.put(fields)
        assert status == 200, first
        assert first["text"] == second["text"]
        if "scores" in first:
            assert first["scores"] == pytest.approx(second["scores"], abs=1e-4)
    scored = {"prompts": first["text"], "tokens_to_generate": 0, "logprobs": True}
    _, first = alone.put(scored)
    _, second = pair.put(scored)
    for one, other in zip(first["logprobs"], second["logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)

    assert alone.send("GET", "/info") == pair.send("GET", "/info")
    for server in (alone, pair):
        status, info = server.send("GET", "/info")
        assert (status, info["name"], info["checkpoint"]) == (200, trained.name, "step 2")
        assert info["defaults"] == asdict(Defaults(seed=1))
        assert info["max_length"] == 32
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=DEADLINE) as page:
            assert page.read().startswith(b"<!doctype html>")
        assert f"http://127.0.0.1:{server.port}/ " in server.run.output
        assert server.send("GET", "/health", Host="evil.example")[0] == 403
        for fields, code in (
            ({"prompts": ["x"]}, "prompt-not-encodable"),
            ({"prompts": ["1"], "tokens_to_generate": True}, "request-value-invalid"),
        ):
            status, response = server.put(fields)
            assert (status, response["codes"]) == (400, [code]), response
        # Concurrent requests share batches, with the same results.
        with ThreadPoolExecutor(6) as pool:
            responses = list(pool.map(server.put, REQUESTS * 2))
        assert responses[:3] == responses[3:]
        assert [status for status, _ in responses] == [200] * 6
    assert "--pipeline-model-parallel-size [no-effect-on-generation]" in alone.run.output


def test_a_closed_connection_cancels_its_request(
    trained: Path, launcher: Launcher, running: list[Server]
) -> None:
    server = Server(launcher, trained, 2)
    running.append(server)
    body = json.dumps(LONG).encode()
    head = f"PUT /api HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + body)
        server.run.wait_until(server.is_busy)
    server.run.wait_until(lambda: not server.is_busy())

    assert "prompts: 128" not in server.run.output
    assert server.put(REQUESTS[0])[0] == 200
    assert "prompts: 2 of 4 tokens, texts: 2 with 18 new tokens" in server.run.output


def test_a_signal_stops_all_ranks_during_a_request(trained: Path, launcher: Launcher) -> None:
    server = Server(launcher, trained, 2)
    with ThreadPoolExecutor(1) as pool:
        response = pool.submit(server.put, LONG)
        server.run.wait_until(server.is_busy)
        os.kill(server.run.pids[0], signal.SIGTERM)
        assert response.result()[0] == 503

    result = server.run.wait()
    assert result.codes == (0, 0), result.output
    assert "Traceback" not in result.output


def test_a_lost_rank_stops_the_server_with_a_message(trained: Path, launcher: Launcher) -> None:
    server = Server(launcher, trained, 2)
    os.kill(server.run.pids[1], signal.SIGKILL)

    assert server.put(REQUESTS[0])[0] == 500
    result = server.run.wait()
    assert result.codes == (4, -signal.SIGKILL), result.output
    assert "Traceback" not in result.output
