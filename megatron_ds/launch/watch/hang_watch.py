"""The watch of --hang-timeout: since when a rank makes no progress, and the report of where it is.

Starts no thread and ends no process: `lifecycle` asks whether the rank is overdue.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from megatron_ds.config.problems import Problem
from megatron_ds.launch import environment
from megatron_ds.launch.ranks.distributed import ExitBoard
from megatron_ds.launch.ranks.launched_hosts import SHOWN_RANKS, ranks_text
from megatron_ds.launch.watch.poll_clock import PollClock

EXCHANGE_S = 5.0
"""Time for all ranks to report where they are when one of them is overdue."""
SUSPENDED_S = 5.0
"""Time between two polls, after which the process was suspended."""
SHOWN_COLLECTIVES = 10


@dataclass(frozen=True)
class HangReport:
    """Position of a rank when the run hung.

    Attributes:
        rank: Global rank.
        place: Host and process.
        iteration: Last iteration that it completed.
        collective: The last collective that it started.
        file: File with its stack traces; "" if it could not be written.
    """

    rank: int
    place: str
    iteration: int
    collective: str
    file: str


class HangWatch:
    """Watches for a rank that makes no progress: that ends no step and no part of an evaluation.

    Without a timeout it is never overdue. Time in which this process is suspended does not count:
    if all ranks were, as by a batch system, they continue. If only one was, the other ranks find
    that they wait for it.

    Args:
        timeout_s: Seconds without progress after which the rank is overdue.
        patient_s: Seconds for phases of unpredictable duration, if that is more.
        folder: Folder of the reports.
    """

    def __init__(
        self, timeout_s: float | None = None, patient_s: float = 0.0, folder: Path = Path()
    ) -> None:
        self.timeout_s = timeout_s
        self.iteration = 0
        self._patient_s = max(patient_s, timeout_s or 0.0)
        self._folder = folder
        self._limit_s: float | None = None
        self._since = time.monotonic()
        self._clock = PollClock()

    def running(self) -> AbstractContextManager[None]:
        """Around the part of the run that is watched."""
        return self._limited(self.timeout_s)

    def patient(self) -> AbstractContextManager[None]:
        """Around work that may take long, of unpredictable duration: a compilation, a save."""
        return self._limited(None if self._limit_s is None else self._patient_s)

    @contextmanager
    def _limited(self, limit_s: float | None) -> Iterator[None]:
        before = self._limit_s
        self._allow(limit_s)
        try:
            yield
        finally:
            self._allow(before)

    def progress(self, iteration: int) -> None:
        """The rank has made progress; `iteration` steps are complete."""
        self.iteration = iteration
        self._allow(self._limit_s)

    def overdue_s(self) -> float | None:
        """The seconds without progress, if they are more than allowed. To be asked regularly."""
        pause = self._clock.poll()
        now = time.monotonic()
        limit = self._limit_s
        if pause > SUSPENDED_S:
            self._since = min(self._since + pause, now)
        passed = now - self._since
        return passed if limit is not None and passed > limit else None

    def write_report(self, rank: int) -> HangReport:
        """Writes the stacks of all threads and the last collectives to a file, or else to stderr.

        Args:
            rank: Global rank of this process.
        """
        origin = f"{socket.gethostname()}, process {os.getpid()}"
        collectives = last_collectives()
        last = collectives[-1] if collectives else "an unknown collective"
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        passed = time.monotonic() - self._since
        head = f"{now} rank {rank} on {origin}: no progress for {passed:.1f} s"
        done = f"last iteration that was completed: {self.iteration}"
        title = "last collectives, the newest at the end:"
        lines = [head, done, title, *collectives, "stacks:", ""]
        path = self._folder / f"hang-rank{rank}.txt"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                _write(file, lines)
            written = str(path)
        except OSError:
            written = ""
            with suppress(OSError, ValueError):
                _write(sys.__stderr__ or sys.stderr, lines)
        return HangReport(rank, origin, self.iteration, last, written)

    def _allow(self, seconds: float | None) -> None:
        self._since = time.monotonic()  # first: another thread reads both
        self._limit_s = seconds


def _write(file: TextIO, lines: Iterable[str]) -> None:
    file.write("\n".join(lines))
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)


def last_collectives() -> list[str]:
    """The last collectives that this rank started, from torch's flight recorder.

    Empty before the first one, and with a torch that records none for the backend.
    """
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not dist.is_initialized():
        return []
    world: Any = dist.distributed_c10d._world
    with suppress(RuntimeError, ValueError, KeyError, TypeError):  # the format is torch's own
        names = world.pg_names
        members = world.pg_group_ranks
        # Groups without this rank have no name.
        ranks = {names[group]: [*members[group]] for group in members if group in names}
        entries = json.loads(dump(True, False))["entries"]
        entries.sort(key=lambda entry: entry["record_id"])
        return [_describe(entry, ranks) for entry in entries[-SHOWN_COLLECTIVES:]]
    return []


def _describe(entry: Mapping[str, Any], ranks: Mapping[str, list[int]]) -> str:
    """Such as `all_reduce number 12 of ranks 0, 1, Float [3]`."""
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    seq_id = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    name = str(entry["process_group"][0])
    group = ranks_text(ranks[name]) if name in ranks else f"group {name}"
    pairs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    shapes = "".join(f", {dtype} {size}" for dtype, size in pairs)
    return f"{operation} number {seq_id} of {group}{shapes}"


def exchange_reports(
    board: ExitBoard, report: HangReport, *, collects: bool, without: int
) -> tuple[list[HangReport], list[int]]:
    """Posts a report; returns all ranks' reports if this one collects them, and silent ranks.

    Args:
        board: Board of the run.
        report: Report of this rank.
        collects: This rank reads the reports; the other ones wait until it has.
        without: Number of ranks that cannot report.
    """
    text = json.dumps(dataclasses.asdict(report))
    count = environment.world_size() - without
    texts, silent = board.exchange_reports(text, count if collects else None, EXCHANGE_S)
    return [HangReport(**json.loads(text)) for text in texts], silent


def hang_problem(
    reports: Iterable[HangReport], silent: Mapping[int, str], seconds: float
) -> Problem:
    """The message of a hung run.

    Args:
        reports: Reports of the ranks that answered.
        silent: Ranks that did not, with what is known of them.
        seconds: The timeout.
    """
    by_collective: dict[str, list[HangReport]] = {}
    for report in sorted(reports, key=lambda item: item.rank):
        by_collective.setdefault(report.collective, []).append(report)
    groups = sorted(by_collective.items(), key=lambda item: len(item[1]))
    parts = [f"rank {rank} {state}" for rank, state in list(silent.items())[:SHOWN_RANKS]]
    if len(silent) > SHOWN_RANKS:
        parts.append(f"{len(silent) - SHOWN_RANKS} more ranks do not answer")
    for collective, members in groups[:SHOWN_RANKS]:
        ranks = ranks_text(report.rank for report in members)
        parts.append(f"the last collective of {ranks} is {collective}")
    every = [report for _, members in groups for report in members]
    files = [report.file for report in every if report.file]
    return Problem(
        "run-hung",
        seconds=seconds,
        iteration=max(report.iteration for report in every),
        places="; ".join(parts),
        files=f"{Path(files[0]).parent}/hang-rank*.txt" if files else "above",
    )
