"""Shared infrastructure of the benchmarks: contenders that run in turn, and machine information.

Each contender runs in its own process, so that contenders share no caches, threads or memory. Only
one contender works at a time. This module does not know what is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import socket
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Work(Protocol):
    """The work of a contender: runs `count` times and returns a report."""

    def __call__(self, count: int) -> Any: ...


class Contender:
    """Runs work in a separate process, which is idle between requests."""

    def __init__(
        self, name: str, build: Callable[..., Work], *arguments: object, daemon: bool = True
    ) -> None:
        """Start the process.

        Args:
            name: Name in error messages.
            build: Module-level function that builds the work in the new process.
            *arguments: Arguments of `build`.
            daemon: Whether the process is a daemon, which exits with this process and cannot have
                child processes.
        """
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child_connection, build, arguments), daemon=daemon, name=name
        )
        self._process.start()
        child_connection.close()

    def run(self, count: int) -> Any:
        """Run the work and return its report.

        Raises:
            RuntimeError: If the work failed, with the contender's traceback, or its process exited.
        """
        self.start(count)
        return self.report()

    def start(self, count: int) -> None:
        """Start the work, for whose end `report` waits."""
        self._connection.send(count)

    def report(self) -> Any:
        """Wait for the work that was started, and return its report. Raises as `run` does."""
        try:
            failure, report = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self.name} exited with status {self._process.exitcode}") from None
        if failure is not None:
            raise RuntimeError(f"{self.name} failed:\n{failure}")
        return report

    def close(self) -> None:
        """Stop the process."""
        self._connection.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, build: Callable[..., Work], arguments: Sequence[Any]) -> None:
    """Main function of a contender's process: serve requests until the pipe is closed."""
    failure, work = _attempt(build, *arguments)
    while True:
        try:
            count = connection.recv()
        except EOFError:
            return
        report = None
        if work is not None:
            failure, report = _attempt(work, count)
        connection.send((failure, report))


def _attempt(function: Callable[..., T], *arguments: Any) -> tuple[str | None, T | None]:
    """Return (None, result), or (traceback, None) if the function raised."""
    try:
        return None, function(*arguments)
    except Exception:
        return traceback.format_exc(), None


def in_turn(contenders: Sequence[Contender], rounds: int, count: int) -> list[list[Any]]:
    """Run the contenders alternately (A B C, A B C, ...); return each one's reports by round."""
    reports: list[list[Any]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, own_reports in zip(contenders, reports, strict=True):
            own_reports.append(contender.run(count))
    return reports


def paired_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Return the median over rounds of the ratio of medians.

    Pairing by round cancels slow changes of the machine's load.
    """
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


def on_ranks(function: Callable[..., T], ranks: int, *arguments: object) -> T:
    """Run a module-level function on CPU ranks with gloo, of a thread each; return the first's.

    Raises:
        RuntimeError: If a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, results, function, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}")
    result: T = results.get()
    return result


def free_port() -> int:
    """A port of this host for the first of several ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def set_rank(rank: int, ranks: int, port: int) -> None:
    """Make this process a rank of this host, of a thread; the first one listens at the port."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def _rank(
    rank: int,
    ranks: int,
    port: int,
    results: Any,
    function: Callable[..., object],
    arguments: Sequence[object],
) -> None:
    set_rank(rank, ranks, port)
    import deepspeed
    import torch

    from megatron_ds.launch.environment import prepare_environment

    prepare_environment()
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    result = function(*arguments)
    if rank == 0:
        results.put(result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Machine:
    """The machine of the measurements."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    load: float
    """Load average of the last minute, before the first measurement."""


def this_machine() -> Machine:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(
        cpu=_cpu_name(),
        cores=cores or 1,
        memory_gib=round(pages / 2**30, 1),
        system=platform.platform(),
        load=round(os.getloadavg()[0], 2),
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of installed packages."""
    installed = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **installed}


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def write_word_model(folder: Path, **shape: Any) -> None:
    """Writes a random GPT-2 with a tokenizer of words w0, w1, ..., as transformers saves it.

    Args:
        folder: Where it is written.
        shape: Arguments of `transformers.GPT2Config`, `vocab_size` among them.
    """
    import tokenizers
    import transformers

    size = shape["vocab_size"]
    vocab = {f"w{number}": number for number in range(size - 1)} | {"<|endoftext|>": size - 1}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<|endoftext|>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    ).save_pretrained(folder)
    config = transformers.GPT2Config(**shape)
    config.bos_token_id = size - 1
    config.eos_token_id = config.bos_token_id
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
