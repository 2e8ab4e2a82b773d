"""What the benchmarks share: contenders in processes of their own, driven in turn; the machine.

A contender lives in its own process, so that no two of them share caches, threads or memory, and
is asked for work only while all others wait. It knows nothing of what is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
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
    """What a contender does when it is asked: something `count` times, and a report of it."""

    def __call__(self, count: int) -> Any: ...


class Contender:
    """Work in a process of its own, which waits between two requests."""

    def __init__(
        self, name: str, build: Callable[..., Work], *arguments: object, daemon: bool = True
    ) -> None:
        """build: a module's function that makes the work, in the new process. daemon: it may have
        no processes of its own, and ends with this one."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(far_end, build, arguments), daemon=daemon, name=name
        )
        self._process.start()
        far_end.close()

    def run(self, count: int) -> Any:
        """The work's report. Raises RuntimeError with the contender's traceback if it failed."""
        self._connection.send(count)
        try:
            failure, report = self._connection.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"{self.name} ended with status {self._process.exitcode}") from None
        if failure is not None:
            raise RuntimeError(f"{self.name} failed:\n{failure}")
        return report

    def close(self) -> None:
        """Ends the process."""
        self._connection.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, build: Callable[..., Work], arguments: Sequence[Any]) -> None:
    """The contender's process: builds the work, does it when asked, ends when the pipe closes."""
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
    """(traceback, None) or (None, result)."""
    try:
        return None, function(*arguments)
    except Exception:
        return traceback.format_exc(), None


def in_turn(contenders: Sequence[Contender], rounds: int, count: int) -> list[list[Any]]:
    """For each contender its report of each round: A B C, A B C, ..."""
    reports: list[list[Any]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, kept in zip(contenders, reports, strict=True):
            kept.append(contender.run(count))
    return reports


def paired_ratio(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """Median over the rounds of the ratio of the rounds' medians: both sides of each ratio were
    measured within the same minute.
    """
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


@dataclass(frozen=True)
class Machine:
    """Where the figures were taken."""

    cpu: str
    cores: int
    memory_gib: float
    system: str
    load: float
    """Processes that wanted to run in the last minute, before the first measurement."""


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
    """Installed versions of packages, Python's among them."""
    found = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), **found}


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
