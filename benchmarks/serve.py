#!/usr/bin/env python
"""Rates of the text generation server, relative to one request at a time and to transformers.

    python benchmarks/serve.py [--model small|gpt2] [--seconds 60] [--output serve.json]
    python benchmarks/serve.py --against CHECKOUT [--starts 5] [--rounds 5]

A random model is served by tools/run_text_generation_server.py. Measured are one request, 24 equal
ones at once, requests of mixed lengths and settings one after another, and as many of them as 200
clients send, of which 5 % are broken: invalid JSON, wrong types, huge bodies, early disconnects.
Every answer must be that of the same request alone. transformers' `generate` and `generate_batch`
(continuous batching) get the same weights, threads and prompts, the former in turn with the server.

With --against, the servers of this and of another checkout of this project are measured instead:
both are started, and the same requests are sent to them in turn. Two processes of one program
differ by some percent for as long as they run, by where their memory is and how their sets are
ordered. So both are started several times (--starts), the one that starts first in turn. A ratio is
the median over the starts, each of which is the median over its rounds; the smallest and the
largest of the starts follow it, because a difference below their distance may be chance. The ratios
of the servers' CPU seconds depend less on what else runs than those of the times; but threads that
wait for each other use CPU time, the more the busier the machine. On a busy one, compare with
--threads 1.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    Contender,
    Work,
    in_turn,
    paired_ratio,
    this_machine,
    versions,
    write_json,
    write_word_model,
)

REPOSITORY = Path(__file__).resolve().parents[1]
LENGTH = 256
PROMPT = 32
NEW = 64
EQUAL = 24
CLIENTS = 200
SLOTS = 32
IN_A_ROW = 3
"""Requests of one kind, so that not all of them follow those of another process."""
BROKEN_SHARE = 0.05
MODELS: dict[str, tuple[dict[str, int], str]] = {
    "small": ({"n_embd": 192, "n_layer": 4, "n_head": 6, "vocab_size": 4096}, "fp32"),
    "gpt2": ({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, "bf16"),
}
"""Shapes, the first one of the demo's model, and the type of the computation."""
Measured = dict[str, tuple[list[list[float]], ...]]
"""Name of the requests -> for each server, values of each round."""


@dataclass
class Load:
    """What the clients got."""

    tokens: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)
    """MiB of the server's process, once a second."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small", help="shape and type")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the short measurements")
    parser.add_argument("--seconds", type=float, default=60, help="duration of the load")
    parser.add_argument("--clients", type=int, default=CLIENTS, help="clients of the load")
    parser.add_argument("--threads", type=int, default=2, help="threads of each contender")
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--starts", type=int, default=5, help="starts of the servers, --against")
    parser.add_argument("--output", type=Path, help="output file (JSON)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, options.model)
        if options.against is not None:
            return compare_checkouts(folder, options)
        batch = measure_batch(folder, options)
        single = Contender(
            "generate", build_peer, "generate", folder, options.model, options.threads
        )
        with closing(single), running_server(folder, options) as (address, process):
            result = asyncio.run(measure(address, process, options, single, batch))
    machine = this_machine()
    print(f"{machine.cpu}, {machine.cores} cores, load {machine.load}; {options.model}")
    for key, value in result.items():
        print(f"{key:58} {value}")
    if options.output is not None:
        packages = versions(["torch", "transformers"])
        write_json(
            options.output, {"machine": asdict(machine), "versions": packages, "result": result}
        )
    return 0 if result["wrong answers"] == 0 else 1


def compare_checkouts(folder: Path, options: argparse.Namespace) -> int:
    """Send the same requests to the servers of two checkouts in turn, and print the ratios."""
    rows: dict[str, list[dict[str, float]]] = {}
    for start in range(options.starts):
        checkouts = [REPOSITORY, options.against.resolve()]
        with ExitStack() as stack:
            servers = {
                checkout: stack.enter_context(running_server(folder, options, checkout))
                for checkout in (checkouts if start % 2 == 0 else reversed(checkouts))
            }
            in_order = [servers[checkout] for checkout in checkouts]
            seconds, cpu_seconds = asyncio.run(measure_in_turn(in_order, options.rounds))
        for name, (ours, theirs) in seconds.items():
            row = {
                "seconds": statistics.median(map(statistics.median, ours)),
                "other_seconds": statistics.median(map(statistics.median, theirs)),
                "ratio": paired_ratio(ours, theirs),
                "cpu_ratio": paired_ratio(*cpu_seconds[name]),
            }
            rows.setdefault(name, []).append(row)
    print(f"{'':32}{'s':>10}{'other, s':>10}{'ratio':>22}{'CPU ratio':>22}")
    for name, starts in rows.items():
        columns = {key: [row[key] for row in starts] for key in starts[0]}
        print(
            f"{name:32}{statistics.median(columns['seconds']):10.4f}"
            f"{statistics.median(columns['other_seconds']):10.4f}"
            f"{with_spread(columns['ratio']):>22}{with_spread(columns['cpu_ratio']):>22}"
        )
    if options.output is not None:
        machine = asdict(this_machine())
        packages = versions(["torch", "transformers"])
        write_json(options.output, {"machine": machine, "versions": packages, "starts": rows})
    return 0


def with_spread(ratios: Sequence[float]) -> str:
    """The median, with the smallest and the largest value."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


async def measure_in_turn(
    servers: Sequence[tuple[str, subprocess.Popen[bytes]]], rounds: int
) -> tuple[Measured, Measured]:
    """Measure the same requests with each server, which is idle while another one works.

    Args:
        servers: The address and the process of each.
        rounds: Number of rounds.

    Returns:
        Times, and CPU seconds of the servers' processes, of one request, of equal ones at once and
        of mixed ones at once: for each server, the values of each round.

    Raises:
        AssertionError: If the servers answer differently.
    """
    import httpx
    import psutil  # type: ignore[import-untyped]

    one = {"prompt": ids_of(1, PROMPT), "max_tokens": NEW, "temperature": 0}
    workloads = {
        "one request": [one],
        f"{EQUAL} equal requests at once": [one] * EQUAL,
        "40 mixed requests at once": mixed_requests(40),
    }
    seconds: Measured = {name: tuple([] for _ in servers) for name in workloads}
    cpu_seconds: Measured = {name: tuple([] for _ in servers) for name in workloads}
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=600))
            for address, _ in servers
        ]
        processes = [psutil.Process(process.pid) for _, process in servers]
        for number, (name, requests) in itertools.product(range(rounds + 1), workloads.items()):
            answers: list[list[str]] = [[] for _ in servers]
            # Which server is first alternates, so that a growing load affects both.
            for which in sorted(range(len(servers)), reverse=number % 2 == 1):
                begin = cpu_seconds_of(processes[which])
                taken = []
                for _ in range(IN_A_ROW):
                    start = time.perf_counter()
                    sent = await asyncio.gather(*(send(clients[which], each) for each in requests))
                    taken.append(time.perf_counter() - start)
                    answers[which] = [answer["choices"][0]["text"] for answer in sent]
                if number > 0:  # the first round warms up
                    seconds[name][which].append(taken)
                    cpu_seconds[name][which].append([cpu_seconds_of(processes[which]) - begin])
            assert answers[0] == answers[1], f"{name}: the servers answer differently"
    return seconds, cpu_seconds


def cpu_seconds_of(process: Any) -> float:
    """CPU seconds of a `psutil.Process` and of its children.

    The kernel's clocks of processes (`clock_getcpuclockid`) count nanoseconds, unlike its files of
    statistics, whose hundredths of a second are some percent of a request.
    """
    ids = [one.pid for one in (process, *process.children(recursive=True))]
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in ids)


async def measure(
    address: str,
    process: subprocess.Popen[bytes],
    options: argparse.Namespace,
    single: Contender,
    batch: float,
) -> dict[str, Any]:
    """
    Args:
        address: Of the server.
        process: The server.
        options: Of the command line.
        single: transformers' `generate` for one request.
        batch: Tokens per second of its `generate_batch`.
    """
    import httpx

    limits = httpx.Limits(max_connections=options.clients + EQUAL)
    async with httpx.AsyncClient(base_url=address, limits=limits, timeout=600) as client:
        one = {"prompt": ids_of(1, PROMPT), "max_tokens": NEW, "temperature": 0}
        await send(client, one)
        theirs = []
        alone = []
        together = []
        for _ in range(options.rounds):
            theirs.append([single.run(1) for _ in range(IN_A_ROW)])
            alone.append([await timed(send(client, one)) for _ in range(IN_A_ROW)])
            equal = asyncio.gather(*(send(client, one) for _ in range(EQUAL)))
            together.append([await timed(equal)])
        pool = mixed_requests(40)
        start = time.perf_counter()
        expected = [await send(client, each) for each in pool]
        one_by_one = sum(tokens_of(each) for each in expected) / (time.perf_counter() - start)
        load = await run_load(client, process, pool, expected, options)
        assert (await client.get("/health")).json()["requests"] == 0
    rate = load.tokens / options.seconds
    third = len(load.memory) // 3
    return {
        "one request (s)": round(statistics.median(map(statistics.median, alone)), 3),
        f"{EQUAL} equal requests / one": round(paired_ratio(together, alone), 2),
        "one request after another (tokens/s)": round(one_by_one, 1),
        f"{options.clients} clients (tokens/s)": round(rate, 1),
        f"{options.clients} clients / one after another (target: 4)": round(rate / one_by_one, 2),
        "transformers generate_batch (tokens/s)": round(batch, 1),
        f"{options.clients} clients / generate_batch (target: 1)": round(rate / batch, 2),
        "generate / ours, per token (target: 1.5)": round(paired_ratio(theirs, alone), 2),
        "answers": load.answers,
        "wrong answers": len(load.wrong),
        "wrongly answered requests": dict(Counter(load.wrong)),
        "broken requests": dict(load.rejected),
        "server's memory (MiB), second and last third of the load": [
            round(max(load.memory[third : 2 * third], default=0)),
            round(max(load.memory[2 * third :], default=0)),
        ],
    }


def measure_batch(folder: Path, options: argparse.Namespace) -> float:
    """Tokens per second of transformers' continuous batching. Its process ends before the others
    are measured, because it leaves a thread that computes."""
    peer = Contender(
        "generate_batch", build_peer, "generate_batch", folder, options.model, options.threads
    )
    with closing(peer):
        (values,) = in_turn([peer], options.rounds, 1)
    return float(statistics.median(values))


def write_model(folder: Path, name: str) -> None:
    """The random model, the same each time."""
    import torch

    torch.manual_seed(0)
    write_word_model(folder, n_positions=LENGTH, initializer_range=0.05, **MODELS[name][0])


@contextmanager
def running_server(
    folder: Path, options: argparse.Namespace, checkout: Path = REPOSITORY
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        checkout / "tools" / "run_text_generation_server.py",
        "--load",
        f"hf:{folder}",
        f"--{MODELS[options.model][1]}",
        "--port",
        port,
        "--inference-max-requests",
        SLOTS,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    process = subprocess.Popen(
        [str(each) for each in command],
        cwd=checkout,
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        process.wait()


def ids_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4000) for _ in range(count)]


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Requests with prompts of 1 to 128 tokens, 1 to 96 new ones, greedy or with a seed."""
    draw = random.Random(7)
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 40},
    ]
    return [
        {
            "prompt": ids_of(number + 100, draw.randint(1, 128)),
            "max_tokens": draw.randint(1, 96),
            "seed": number,
            **settings[number % len(settings)],
        }
        for number in range(count)
    ]


async def send(client: Any, request: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def tokens_of(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["completion_tokens"])


async def timed(work: Any) -> float:
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def run_load(
    client: Any,
    process: subprocess.Popen[bytes],
    pool: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    options: argparse.Namespace,
) -> Load:
    """All clients send requests until the time is over; tokens count if they came within it."""
    import psutil

    load = Load()
    end = time.perf_counter() + options.seconds

    async def client_loop(number: int) -> None:
        draw = random.Random(number)
        while time.perf_counter() < end:
            if draw.random() < BROKEN_SHARE:
                await send_broken(client, draw, load)
                continue
            which = draw.randrange(len(pool))
            answer = await send(client, pool[which])
            load.answers += 1
            if answer["choices"][0]["text"] != expected[which]["choices"][0]["text"]:
                load.wrong.append(f"request {which}")
            if time.perf_counter() <= end:
                load.tokens += tokens_of(answer)

    async def watch_memory() -> None:
        server = psutil.Process(process.pid)
        while time.perf_counter() < end:
            load.memory.append(server.memory_info().rss / 2**20)
            await asyncio.sleep(1)

    await asyncio.gather(watch_memory(), *(client_loop(each) for each in range(options.clients)))
    return load


async def send_broken(client: Any, draw: random.Random, load: Load) -> None:
    """A request that must be rejected, or that is given up."""
    import httpx

    kind = draw.choice(["bad JSON", "wrong type", "huge body", "disconnect"])
    if kind == "disconnect":
        request = {"prompt": [1, 2, 3], "max_tokens": 200, "stream": True}
        async with client.stream("POST", "/v1/completions", json=request) as response:
            assert response.status_code == 200
            await response.aiter_lines().__anext__()
        load.rejected[kind] += 1
        return
    body = {"bad JSON": b'{"prompt": [1,', "wrong type": b'{"prompt": 5, "max_tokens": "x"}'}
    try:
        response = await client.post("/v1/completions", content=body.get(kind, b"x" * (9 << 20)))
        assert response.status_code == 400, response.status_code
        load.rejected[kind] += 1
    except httpx.WriteError:
        load.rejected[f"{kind}, closed"] += 1


def build_peer(kind: str, folder: Path, name: str, threads: int) -> Work:
    """transformers' generation: seconds of a single text, or tokens per second of the pool."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[MODELS[name][1]]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    end = {"eos_token_id": None, "pad_token_id": 0}

    def single(count: int) -> float:
        prompt = torch.tensor([ids_of(1, PROMPT)])
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **end)
        return time.perf_counter() - start

    def batch(count: int) -> float:
        pool = [each for each in mixed_requests(40) for _ in range(2)]
        settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=48, **end)
        start = time.perf_counter()
        outputs = model.generate_batch(
            [each["prompt"] for each in pool], generation_config=settings, progress_bar=False
        )
        seconds = time.perf_counter() - start
        return sum(len(each.generated_tokens) for each in outputs.values()) / seconds

    work = single if kind == "generate" else batch
    work(1)
    return functools.partial(work)


if __name__ == "__main__":
    sys.exit(main())
