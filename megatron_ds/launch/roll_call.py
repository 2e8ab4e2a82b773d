"""The roll call: what every rank was started with, or why it cannot start, before a run begins.

All ranks meet at the store where they form their process group later. Each says what it was started
with. The first rank compares it, asks every host for its time and whether it sees the shared
folders, and gives one verdict: the run starts on all hosts, or ends on all of them with one
message. A rank that fails before comes only to say so. The traffic grows with the number of ranks:
facts that many ranks have are sent once.
"""

from __future__ import annotations

import hashlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ds.config.problems import Problem
from megatron_ds.launch import environment, launched_hosts, output, software
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.host_differences import RankEntry, Verdict, clock_problems, judge

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

POLL_S = 0.05
SLICE_S = 5.0
"""Time after which a wait inside torch returns to Python, where a signal may be waiting."""
FAILURE_GRACE_S = 15.0
"""Time for further ranks to come once one has said that it cannot start."""
REPORT_S = 45.0
"""Longest wait of a rank that cannot start for a verdict that includes its reason."""
ANSWER_S = 45.0
"""Longest wait for the answers of the hosts: a file system may show a file late."""
GOODBYE_S = 20.0
"""How long the first rank keeps the store for ranks that have yet to read the verdict."""
SILENT_S, REMINDER_S = 5.0, 60.0
"""When the first rank first says which ranks it waits for, and how often again."""


class HostsDiffer(RunAborted):
    """Ends all ranks of a run that cannot start on all hosts; the first one prints the message."""


class Probe(Protocol):
    """A question of the first rank, which the first rank of each host answers; all are JSON."""

    def ask(self) -> Any:
        """The question, for a host that sees the answer of the first rank."""

    def answer(self, question: Any) -> Any:
        """The answer of this host."""

    def find_problems(self, question: Any, answers: Mapping[str, Any]) -> list[Problem]:
        """What the answers show, by name of the host. Ends the question."""


class RollCall:
    """The roll call of one process, which takes part at most once."""

    def __init__(self) -> None:
        self.probe: Probe | None = None
        self.is_over = False
        """Whether there is a verdict, or no way to get one."""
        self._verdict: Verdict | None = None
        self._facts: dict[str, Mapping[str, str]] = {}
        self._store: Store | None = None
        self._has_posted = self._leads = False

    def describe(self, section: str, facts: Mapping[str, str]) -> None:
        """Adds what this rank was started with.

        Args:
            section: A key of `SECTION_CODES`.
            facts: Names and values, which must be equal on all ranks.
        """
        self._facts[section] = facts

    def attend(
        self, timeout: timedelta, meeting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Waits for the verdict. Collective, before the process group exists.

        Args:
            timeout: For all ranks to come.
            meeting: Entered while this rank looks for the store.

        Raises:
            HostsDiffer: On every rank, if the run cannot start.
            torch.distributed.DistError: If the store does not answer.
        """
        if environment.world_size() == 1:
            return
        try:
            self._verdict = verdict = self._take_part(timeout.total_seconds(), meeting=meeting)
        finally:
            self.is_over = True
        if verdict.text:
            raise HostsDiffer(verdict.text, ExitCode(verdict.code))

    def close(self) -> None:
        """Leaves the store, which the process group has opened meanwhile."""
        self._store = None

    def report(self, problems: Sequence[str], code: int) -> Verdict | None:
        """Says why this rank cannot start, if the other hosts do not know yet.

        Args:
            problems: Messages for the user.
            code: Exit status of them.

        Returns:
            The verdict on the run; None if there is none within `REPORT_S`.
        """
        if self.is_over or not environment.spans_hosts():
            return self._verdict
        try:
            return self._take_part(REPORT_S, tuple(problems), code)
        except Exception:  # the report of this rank is what matters
            return None
        finally:
            self.is_over = True

    def say_goodbye(self) -> None:
        """On the first rank: keeps the store until all ranks have read the verdict."""
        end = time.monotonic() + GOODBYE_S
        with suppress(RuntimeError):
            while self._leads and self._store is not None and time.monotonic() < end:
                if self._store.add("read", 0) >= environment.world_size():
                    return
                time.sleep(POLL_S)

    def _take_part(
        self,
        timeout_s: float,
        problems: tuple[str, ...] = (),
        code: int = ExitCode.FINISHED,
        meeting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Verdict:
        with meeting():
            store = _connect(timeout_s)
        self._store = store
        self._post(store, problems, code)
        if environment.rank() == 0 and not self._leads:
            self._leads = True
            verdict = self._lead(store, timeout_s)
            store.set("verdict", json.dumps(asdict(verdict)))
            store.add("read", 1)
            return verdict
        end = time.monotonic() + timeout_s + ANSWER_S + FAILURE_GRACE_S
        if environment.local_rank() == 0:
            question = json.loads(_wait_for(store, "question", end))
            store.set(f"answer {environment.rank()}", json.dumps(self._answer(question)))
        verdict = Verdict(**json.loads(_wait_for(store, "verdict", end)))
        store.add("read", 1)
        return verdict

    def _post(self, store: Store, problems: tuple[str, ...], code: int) -> None:
        """Says what this rank was started with; of the files of a host one rank knows."""
        facts: dict[str, Mapping[str, str]] = dict(self._facts)
        facts["software"] = software.versions()
        if environment.local_rank() == 0 and environment.spans_hosts():
            facts["source"] = software.source_digests()
        digests = {}
        for section, values in facts.items():
            text = json.dumps(values)
            digests[section] = hashlib.sha256(text.encode()).hexdigest()
            if not store.check([digests[section]]):
                store.set(digests[section], text)
        entry = RankEntry(environment.rank(), socket.gethostname(), {}, problems, code)
        store.set(f"entry {environment.rank()}", json.dumps({**asdict(entry), "facts": digests}))
        store.add("failed", bool(problems))
        store.add("present", not self._has_posted)
        self._has_posted = True

    def _lead(self, store: Store, timeout_s: float) -> Verdict:
        absent = self._wait_for_all(store, timeout_s)
        entries = self._entries(store)
        hosts = {entry.rank: entry.host for entry in entries}
        first_of_host = {hosts[rank]: rank for rank in sorted(hosts, reverse=True)}.values()
        asked, question, found = time.time(), None, list[Problem]()
        if self.probe is not None and environment.spans_hosts():
            question = self.probe.ask()
        store.set("question", json.dumps(question))
        own = self._answer(question)
        end = time.monotonic() + ANSWER_S
        answers = {hosts[0]: own}
        for rank in first_of_host:
            with suppress(RuntimeError):  # it has failed since
                if rank != 0:
                    answer = _wait_for(store, f"answer {rank}", end)
                    answers[hosts[rank]] = json.loads(answer)
        clocks = {host: float(answer["time"]) for host, answer in answers.items()}
        found += clock_problems(asked, clocks, time.time(), hosts[0])
        if self.probe is not None and question is not None:
            views = {host: answer["view"] for host, answer in answers.items()}
            found += self.probe.find_problems(question, views)
        return judge(entries, found, absent)

    def _answer(self, question: Any) -> dict[str, Any]:
        now = time.time()
        view = None
        if self.probe is not None and question is not None:
            view = self.probe.answer(question)
        return {"time": now, "view": view}

    def _wait_for_all(self, store: Store, timeout_s: float) -> Problem | None:
        """Waits until all ranks are there, or some cannot start and no others come."""
        start = time.monotonic()
        end, reminder = start + timeout_s, start + SILENT_S
        failed = False
        while store.add("present", 0) < environment.world_size():
            now = time.monotonic()
            if not failed and store.add("failed", 0):
                failed, end = True, min(end, now + FAILURE_GRACE_S)
            if now > reminder or now > end:
                missing = launched_hosts.describe(_ranks(store, present=False))
            if now > end:
                return Problem(
                    "ranks-missing",
                    missing=missing,
                    size=environment.world_size(),
                    seconds=timeout_s,
                    address=environment.rendezvous(),
                )
            if now > reminder:
                reminder += REMINDER_S
                size, seconds = environment.world_size(), now - start
                text = f"waiting for {missing} of {size} processes, for {seconds:.0f} s"
                output.print_error(output.with_rank_prefix(text))
            time.sleep(POLL_S)
        return None

    def _missing(self, store: Store) -> list[int]:
        return [
            rank for rank in range(environment.world_size()) if not store.check([f"entry {rank}"])
        ]

    def _entries(self, store: Store) -> list[RankEntry]:
        """What the ranks that are there have said."""
        present = [
            rank for rank in range(environment.world_size()) if store.check([f"entry {rank}"])
        ]
        given = [json.loads(store.get(f"entry {rank}")) for rank in present]
        digests = {digest for entry in given for digest in entry["facts"].values()}
        sections = {digest: json.loads(store.get(digest)) for digest in digests}
        return [
            RankEntry(
                entry["rank"],
                entry["host"],
                {name: sections[digest] for name, digest in entry["facts"].items()},
                tuple(entry["problems"]),
                entry["code"],
            )
            for entry in given
        ]


def _ranks(store: Store, *, present: bool) -> list[int]:
    """The ranks that have come, or the other ones."""
    ranks = range(environment.world_size())
    return [rank for rank in ranks if store.check([f"entry {rank}"]) == present]


def _connect(timeout_s: float) -> Store:
    """The store of the run, which the first rank hosts, unless an agent of torchrun does.

    torch opens it again for the process group.
    """
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    host, _, port = environment.rendezvous().rpartition(":")
    is_host = environment.rank() == 0 and not environment.is_store_of_agent()
    store = TCPStore(
        host,
        int(port),
        None,
        is_host,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return PrefixStore("roll call", store)


def _wait_for(store: Store, key: str, end: float) -> bytes:
    """The value of a key, once it is there.

    Raises:
        torch.distributed.DistError: If it is not there at the end, or the store is gone.
    """
    while not store.check([key]):
        left = end - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(0.001, min(left, SLICE_S))))
        except RuntimeError:
            if left <= SLICE_S:
                raise
    return bytes(store.get(key))
