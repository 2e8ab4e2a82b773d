#!/usr/bin/env python
"""Attention of two context-parallel ranks: its time, and how much of the messages' it hides.

    context.py REPORT HEADS HEAD_SIZE LENGTH ...

is the program of one rank; `measure` starts both. Ranks have a device each, or share the only one
and communicate by gloo. Each kind of exchange is timed as a run uses it, with blocks of attention
but no messages, and with messages but no attention.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.accelerator.processes import Row, read_json, run

RANKS = 2
REPEATS = 10
WARM_UP = 3
GROUPED = 4
"""Query heads of a key-value head, where the number of heads allows it."""
ALONE = "no messages"
"""Kind of exchange, only here, that computes every block of keys and sends nothing."""


def measure(*, heads: int, head_dim: int, lengths: Sequence[int]) -> Iterator[Row]:
    """Start both ranks and yield a row for each length and kind of exchange.

    Args:
        heads: Query heads.
        head_dim: Size of a head.
        lengths: Tokens of the complete sequences.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        report = Path(folder) / "report.json"

        def start(rank: int) -> Any:
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": RANKS,
                "LOCAL_WORLD_SIZE": RANKS,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            words = [f"{name}={value}" for name, value in variables.items()]
            program = [Path(__file__).resolve(), *words, report, heads, head_dim, *lengths]
            return run(program, timeout=300)

        with ThreadPoolExecutor(RANKS) as pool:
            outcomes = list(pool.map(start, range(RANKS)))
        failed = [outcome for outcome in outcomes if outcome.status != 0]
        if failed or not report.exists():
            yield {"name": "both ranks", **(failed or outcomes)[0].describe(), "passed": False}
            return
        yield from read_json(report)["rows"]


def lines(row: Row) -> Iterator[str]:
    """Format the figures of a case."""
    if "seconds" not in row:
        yield f"{row['name']}: failed"
        yield from ("    " + line for line in row.get("output", "").splitlines()[-8:])
        return
    yield (
        f"{row['name']:12} {row['length']:7} tokens {row['seconds'] * 1e3:10.2f} ms, attention "
        f"alone {row['attention_seconds'] * 1e3:.2f}, messages alone "
        f"{row['messages_seconds'] * 1e3:.2f}, hidden {row['hidden']:.0%}, ranks' time relative to "
        f"one process {row['ratio']:.2f} ({row['backend']}, {row['devices']} devices)"
    )


def of_rank(report: Path, heads: int, head_dim: int, lengths: Sequence[int]) -> None:
    """Measure as one of the ranks; the first one writes the report. Collective."""
    from benchmarks.common import write_json
    from megatron_ds.config import RuntimeConfig
    from megatron_ds.launch import environment

    environment.prepare_environment()
    import torch
    from deepspeed.accelerator import get_accelerator

    from megatron_ds.launch.ranks import distributed
    from megatron_ds.parallel.context.exchange import EXCHANGES

    devices = get_accelerator().device_count() if get_accelerator().device_name() != "cpu" else 0
    backend = "gloo" if devices < RANKS else None
    if 0 < devices < RANKS:
        os.environ["LOCAL_RANK"] = "0"
    here = distributed.init_distributed(RuntimeConfig(distributed_backend=backend))
    torch.manual_seed(0)
    kinds = list(EXCHANGES)
    EXCHANGES[ALONE] = NoMessages
    rows = []
    for length in lengths:
        seconds = {kind: _attention_seconds(kind, length, heads, head_dim) for kind in EXCHANGES}
        one_process = _one_process_seconds(length, heads, head_dim)
        for kind in kinds:
            messages = _message_seconds(kind, length, heads, head_dim)
            hidden = 1 - (seconds[kind] - seconds[ALONE]) / messages
            rows.append(
                {
                    "name": kind,
                    "length": length,
                    "seconds": seconds[kind],
                    "attention_seconds": seconds[ALONE],
                    "messages_seconds": messages,
                    "hidden": min(1.0, max(0.0, hidden)),
                    "ratio": RANKS * seconds[kind] / one_process,
                    "backend": here.backend,
                    "devices": devices,
                    "passed": True,
                }
            )
    if here.rank == 0:
        write_json(report, {"rows": rows})
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class NoMessages:
    """An `Exchange` whose keys of other ranks are this rank's own."""

    def __init__(self, keys: Any, group: Any, needs: Callable[[int, int], Sequence[int]]) -> None:
        self._keys = keys
        self._group = group
        self._needs = needs
        self._total = keys

    def receive(self) -> Iterator[Any]:
        from megatron_ds.parallel.context.exchange import Received

        rank = self._group.rank
        for step in range(self._group.size):
            owner = (rank - step) % self._group.size
            needed = self._needs(rank, owner)
            first, end = (needed[0], needed[-1] + 1) if needed else (0, 0)
            yield Received(owner, needed, self._keys[first:end])

    def give_back(self, received: Any, grads: Any) -> None:
        if received.owner == self._group.rank:
            self._total = grads

    def collect(self) -> Any:
        return self._total


def _attention_seconds(kind: str, length: int, heads: int, head_dim: int) -> float:
    """Median time of a forward and a backward pass of this rank's attention. Collective."""
    from megatron_ds.model.attention.context import ContextAttention
    from megatron_ds.model.attention.rule import AttentionRule

    core = ContextAttention(AttentionRule(), _group(), kind)
    q, k, v = _draw(length // RANKS, heads, head_dim)

    def work() -> None:
        core.attend(q, k, v, 0.0).sum().backward()

    return _median_seconds(work)


def _message_seconds(kind: str, length: int, heads: int, head_dim: int) -> float:
    """Median time of the messages of both passes without attention. Collective."""
    from megatron_ds.parallel.context.exchange import EXCHANGES
    from megatron_ds.parallel.context.layout import CHUNKS, ContextLayout, VisibleKeys

    group = _group()
    tokens = length // RANKS
    _, k, v = _draw(tokens, heads, head_dim)
    layout = ContextLayout(group.rank, group.size, tokens // CHUNKS, VisibleKeys(None, None))
    size = k.shape[-1] + v.shape[-1]
    keys = k.new_zeros(CHUNKS, tokens // CHUNKS, 1, k.shape[1], size)

    def work() -> None:
        for _ in EXCHANGES[kind](keys, group, layout.needs).receive():
            pass
        exchange = EXCHANGES[kind](keys, group, layout.needs)
        for received in exchange.receive():
            exchange.give_back(received, received.values.float())
        exchange.collect()

    return _median_seconds(work)


def _one_process_seconds(length: int, heads: int, head_dim: int) -> float:
    """Median time of torch's causal attention to the complete sequences. The other rank waits,
    since it may share the device. Collective."""
    import torch.nn.functional as F

    q, k, v = _draw(length, heads, head_dim)
    is_idle = _group().rank > 0

    def work() -> None:
        if is_idle:
            return
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended.sum().backward()

    return _median_seconds(work)


def _group() -> Any:
    import torch.distributed as dist

    from megatron_ds.parallel.mesh import Group

    return Group(tuple(range(RANKS)), dist.get_rank(), dist.group.WORLD)


def _draw(tokens: int, heads: int, head_dim: int) -> list[Any]:
    """Queries, keys and values [1, heads, tokens, head_dim] in bf16; on a CPU in fp32."""
    import torch
    from deepspeed.accelerator import get_accelerator

    where = torch.device(get_accelerator().current_device_name())
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    kv_heads = heads // GROUPED if heads % GROUPED == 0 else heads
    sizes = [(1, number, tokens, head_dim) for number in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, device=where, dtype=dtype, requires_grad=True) for size in sizes]


def _median_seconds(work: Callable[[], object]) -> float:
    """Median time of what both ranks begin together and their devices have finished."""
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    synchronize = get_accelerator().synchronize
    times = []
    for _ in range(WARM_UP + REPEATS):
        synchronize()
        dist.barrier()
        begin = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    words = sys.argv[1:]
    variables = [word.partition("=") for word in words if "=" in word]
    os.environ.update({name: value for name, _, value in variables})
    report, heads, head_dim, *lengths = (word for word in words if "=" not in word)
    of_rank(Path(report), int(heads), int(head_dim), [int(length) for length in lengths])


if __name__ == "__main__":
    main()
