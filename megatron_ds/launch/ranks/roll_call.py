"""The roll call: what every rank was started with, or why it cannot start, before a run begins.

All ranks meet at the store where they form their process group later. Each reports what it was
started with. The first rank compares it, asks every host for its time and whether it sees the
shared folders, and gives one verdict: the run starts on all hosts, or ends on all of them with one
message. A rank that fails before comes only to report it. The traffic grows with the number of
ranks: facts that many ranks have are sent once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ds.config.problems import Problem
from megatron_ds.launch import environment, output, software
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.process.time_limits import call_with_timeout
from megatron_ds.launch.ranks import launched_hosts
from megatron_ds.launch.ranks.host_differences import (
    MODULES,
    SOFTWARE,
    SOURCE,
    RankEntry,
    Verdict,
    clock_problems,
    judge,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

POLL_S = 0.01
SLICE_S = 1.0
"""Time after which a wait inside torch returns to Python, where a signal may be waiting."""
FAILURE_GRACE_S = 15.0
"""Time for further ranks to come once one has reported that it cannot start."""
REPORT_S = 30.0
"""Longest wait of a rank that cannot start for a verdict that includes its reason."""
ANSWER_S = 90.0
"""Longest wait for the answers of the hosts: a file system may show a file late."""
GOODBYE_S = 20.0
"""Time for which the first rank keeps the store for ranks that have yet to read the verdict."""
LEADER = "leader"
"""Key of the token of the first rank, below which it reads and writes. A store that outlives its
ranks, such as torchrun's agent's, has the tokens of earlier attempts: a rank begins again when the
token changes, and only takes what the first rank has written for its own token."""
SILENT_S = 5.0
"""Delay until the first rank logs which ranks it waits for."""
REMINDER_S = 60.0
"""Interval of these logs afterwards."""


class HostsDiffer(RunAborted):
    """Ends all ranks of a run that cannot start on all hosts; the first one prints the message."""


class Probe(Protocol):
    """A question of the first rank, which the first rank of each host answers; all are JSON."""

    def ask(self) -> Any:
        """The question, for a host that sees the answer of the first rank."""

    def answer(self, question: Any) -> Any:
        """The answer of this host."""

    def find_problems(self, question: Any, answers: Mapping[str, Any]) -> list[Problem]:
        """Problems in the answers, which are by name of the host. Ends the question."""


class RollCall:
    """The roll call of one process, which takes part once."""

    def __init__(self) -> None:
        self.probe: Probe | None = None
        self.is_over = False
        """Whether there is a verdict, or no way to get one."""
        self._verdict: Verdict | None = None
        self._facts: dict[str, Mapping[str, str]] = {}
        self._takes_part = False
        self._store: Store | None = None
        self._leader: _Leader | None = None
        self._counted: set[str] = set()

    def describe(self, section: str, facts: Mapping[str, str]) -> None:
        """Adds what this rank was started with.

        Args:
            section: Section, see `host_differences`.
            facts: Names and values, which must be equal on all ranks.
        """
        self._facts[section] = facts

    def attend(
        self, timeout: timedelta, meeting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Waits for the verdict. Collective, before the process group exists.

        Args:
            timeout: Time limit for all ranks to arrive.
            meeting: Entered while this rank looks for the store.

        Raises:
            HostsDiffer: On every rank, if the run cannot start.
            torch.distributed.DistError: If the store does not answer.
        """
        if environment.world_size() == 1:
            return
        try:
            self._verdict = self._take_part(timeout.total_seconds(), meeting=meeting)
            verdict = self._verdict
        finally:
            self.is_over = True
        if verdict.text:
            raise HostsDiffer(verdict.text, ExitCode(verdict.code))

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for other ones."""
        return self._takes_part and not self.is_over

    def report(self, problems: Sequence[str], code: int, lost: int = 0) -> Verdict | None:
        """Reports why this rank, or the run, cannot start, if the other hosts do not know yet.

        Args:
            problems: Messages for the user.
            code: Exit status of them.
            lost: Number of ranks that will not come.

        Returns:
            The verdict on the run; None without a verdict within `REPORT_S`.
        """
        is_cut_off = self._takes_part and self._store is None
        if self.is_over or is_cut_off or not environment.spans_hosts():
            return self._verdict

        def take_part() -> Verdict | None:
            with suppress(Exception):  # the report of this rank is what matters
                return self._take_part(REPORT_S, tuple(problems), code, lost)
            return None

        # torch's client waits indefinitely for a server that does not answer.
        limit_s = REPORT_S + ANSWER_S + FAILURE_GRACE_S
        try:
            self._verdict = call_with_timeout(take_part, default=None, timeout_s=limit_s)
        finally:
            self.is_over = True
        return self._verdict

    def say_goodbye(self) -> None:
        """Keeps the store open on the first rank until all ranks have read the verdict."""
        if self._leader is not None and self._verdict is not None:
            with suppress(RuntimeError):
                self._leader.say_goodbye(self._verdict)

    def close(self) -> None:
        """Leaves the store, which the process group has opened meanwhile."""
        self._store = None
        self._leader = None

    def _take_part(
        self,
        timeout_s: float,
        problems: tuple[str, ...] = (),
        code: int = ExitCode.FINISHED,
        lost: int = 0,
        meeting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Verdict:
        self._takes_part = True
        with meeting():
            self._store = _connect(timeout_s)
            store = self._store
        rank = environment.rank()
        token = secrets.token_hex(8)
        is_first = environment.local_rank() == 0
        host = socket.gethostname()
        entry = RankEntry(rank, host, self._all_facts(), problems, code, is_first)
        if rank == 0 and self._leader is None:
            self._leader = _Leader(_below(token, store), self.probe)
            leader = self._leader
            self._post(token, token, entry, lost)
            store.set(LEADER, token)
            self._verdict = leader.decide(timeout_s)
            return self._verdict
        end = time.monotonic() + timeout_s + ANSWER_S + FAILURE_GRACE_S
        while True:
            first = _wait_for(store, LEADER, end).decode()
            self._post(first, token, entry, lost)
            call = _below(first, store)
            is_current = functools.partial(_is_leader, store, first)
            with suppress(_AnotherAttempt):
                if is_first and rank != 0:
                    question = json.loads(_wait_for(call, f"question {token}", end, is_current))
                    call.set(f"answer {token}", json.dumps(_answer(self.probe, question)))
                text = _wait_for(call, f"verdict {token}", end, is_current)
                call.add("read", 1)
                return Verdict(**json.loads(text))

    def _all_facts(self) -> dict[str, Mapping[str, str]]:
        """The facts of this rank's start; one rank of a host has the facts about its files."""
        facts = {**self._facts, SOFTWARE: software.versions()}
        if environment.local_rank() == 0 and environment.spans_hosts():
            facts |= {SOURCE: software.source_digests(), MODULES: software.module_digests()}
        return facts

    def _post(self, first: str, token: str, entry: RankEntry, lost: int) -> None:
        """Writes an entry; facts that another rank has written are only named."""
        assert self._store is not None
        call = _below(first, self._store)
        digests = {}
        for section, values in entry.facts.items():
            text = json.dumps(values)
            digests[section] = hashlib.sha256(text.encode()).hexdigest()
            if not call.check([digests[section]]):
                call.set(digests[section], text)
        words = {**asdict(entry), "facts": digests, "token": token}
        call.set(f"entry {entry.rank}", json.dumps(words))
        call.add("lost", lost)
        call.add("failed", bool(entry.problems))
        call.add("present", first not in self._counted)
        self._counted.add(first)


class _Leader:
    """The first rank's part: it collects the reports of the ranks, asks the hosts, and decides.

    Args:
        call: Part of the store below the token of the first rank.
        probe: A question to the hosts.
    """

    def __init__(self, call: Store, probe: Probe | None) -> None:
        self._call = call
        self._probe = probe
        self._size = environment.world_size()
        self._tokens: dict[int, str] = {}
        """Tokens of the ranks that have read, or will read, the verdict."""

    def decide(self, timeout_s: float) -> Verdict:
        """Waits for all ranks, and gives them the verdict."""
        absent = self._wait_for_all(timeout_s)
        entries = self._read_entries()
        asked = time.time()
        question = None
        problems = list[Problem]()
        if self._probe is not None and environment.spans_hosts():
            question = self._probe.ask()
        answers, silent = self._ask(question, [entry for entry in entries if entry.is_first])
        clocks = {host: float(answer["time"]) for host, answer in answers.items()}
        problems += clock_problems(asked, clocks, time.time(), entries[0].host)
        if self._probe is not None and question is not None:
            views = {host: answer["view"] for host, answer in answers.items() if answer["view"]}
            problems += self._probe.find_problems(question, views)
        if silent:
            problems.append(Problem("hosts-silent", hosts=", ".join(silent), seconds=ANSWER_S))
        verdict = judge(entries, problems, absent)
        self._announce(verdict, self._tokens)
        return verdict

    def say_goodbye(self, verdict: Verdict) -> None:
        """Waits until all ranks have read the verdict, also those that come now."""
        end = time.monotonic() + GOODBYE_S
        while time.monotonic() < end:
            read = self._call.add("read", 0) + self._call.add("lost", 0)
            if read >= self._size - 1:
                return
            if self._call.add("present", 0) > len(self._tokens):
                known = set(self._tokens)
                self._read_entries()
                self._announce(verdict, self._tokens.keys() - known)
            time.sleep(POLL_S)

    def _announce(self, verdict: Verdict, ranks: Iterable[int]) -> None:
        text = json.dumps(asdict(verdict))
        for rank in ranks:
            self._call.set(f"verdict {self._tokens[rank]}", text)

    def _ask(self, question: Any, firsts: Sequence[RankEntry]) -> tuple[dict[str, Any], list[str]]:
        """The answers of the hosts by name, and the hosts that do not answer.

        Containers of one host may have its name.
        """
        tokens = dict[str, str]()
        answers = dict[str, Any]()
        silent = list[str]()
        for entry in firsts[1:]:
            is_known = entry.host == firsts[0].host or entry.host in tokens
            name = f"{entry.host} (rank {entry.rank})" if is_known else entry.host
            tokens[name] = self._tokens[entry.rank]
            self._call.set(f"question {tokens[name]}", json.dumps(question))
        answers[firsts[0].host] = _answer(self._probe, question)
        end = time.monotonic() + ANSWER_S
        for name, token in tokens.items():
            try:
                answers[name] = json.loads(_wait_for(self._call, f"answer {token}", end))
            except RuntimeError:  # it has failed since
                silent.append(name)
        return answers, silent

    def _wait_for_all(self, timeout_s: float) -> Problem | None:
        """Waits until all ranks are there, or some cannot start and no others come."""
        start = time.monotonic()
        size = self._size
        failed = False
        missing = ""
        end = start + timeout_s
        reminder = start + SILENT_S
        while self._call.add("present", 0) + self._call.add("lost", 0) < size:
            now = time.monotonic()
            if not failed and self._call.add("failed", 0):
                failed = True
                end = min(end, now + FAILURE_GRACE_S)
            if now > min(reminder, end):
                missing = launched_hosts.describe(self._ranks(present=False))
            if now > end and failed:
                return None
            if now > end:
                address = environment.rendezvous()
                values = {"missing": missing, "size": size, "address": address}
                return Problem("ranks-missing", seconds=timeout_s, **values)
            if now > reminder:
                reminder += REMINDER_S
                text = f"waiting for {missing} of {size} processes"
                output.print_error(output.with_rank_prefix(text))
            time.sleep(POLL_S)
        return None

    def _ranks(self, *, present: bool) -> list[int]:
        """The ranks that have reported, or those that have not."""
        ranks = range(self._size)
        return [rank for rank in ranks if self._call.check([f"entry {rank}"]) == present]

    def _read_entries(self) -> list[RankEntry]:
        """Answers of the ranks that are there."""
        entries = [json.loads(self._call.get(f"entry {n}")) for n in self._ranks(present=True)]
        self._tokens |= {words["rank"]: words.pop("token") for words in entries}
        digests = {digest for words in entries for digest in words["facts"].values()}
        sections = {digest: json.loads(self._call.get(digest)) for digest in digests}
        for words in entries:
            words["facts"] = {name: sections[key] for name, key in words["facts"].items()}
            words["problems"] = tuple(words["problems"])
        return [RankEntry(**words) for words in entries]


class _AnotherAttempt(Exception):
    """The first rank has another token."""


def _answer(probe: Probe | None, question: Any) -> dict[str, Any]:
    now = time.time()
    asked = probe is not None and question is not None
    return {"time": now, "view": probe.answer(question) if probe is not None and asked else None}


def _connect(timeout_s: float) -> Store:
    """The store of the run, which the first rank hosts, unless an agent of torchrun does.

    torch opens it again for the process group.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = environment.rendezvous().rpartition(":")
    is_host = environment.rank() == 0 and not environment.is_store_of_agent()
    timeout = timedelta(seconds=timeout_s)
    options = {"multi_tenant": True}
    store = TCPStore(host, int(port), None, is_host, timeout, wait_for_workers=False, **options)
    return _below("roll call", store)


def _below(prefix: str, store: Store) -> Store:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, store)


def _is_leader(store: Store, token: str) -> bool:
    return bool(store.get(LEADER).decode() == token)


def _always() -> bool:
    return True


def _wait_for(
    store: Store, key: str, end: float, is_current: Callable[[], bool] = _always
) -> bytes:
    """The value of a key, once it is there.

    Raises:
        _AnotherAttempt: If it will not come.
        torch.distributed.DistError: If it is not there at the end, or the store is gone.
    """
    while not store.check([key]):
        left = end - time.monotonic()
        try:
            store.wait([key], timedelta(seconds=max(0.001, min(left, SLICE_S))))
        except RuntimeError:
            if left <= SLICE_S:
                raise
            if not is_current():
                raise _AnotherAttempt from None
    return bytes(store.get(key))
