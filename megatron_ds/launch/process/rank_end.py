"""Ends a rank: asks the roll call and the exit board, prints the verdict, and exits.

The verdict is a function of what the rank knows, without effects.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from megatron_ds.config.problems import Problem, ignore
from megatron_ds.launch import attempts, environment, output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process import rank_log
from megatron_ds.launch.process.error_report import ErrorReport
from megatron_ds.launch.process.time_limits import call_with_timeout, end_process, say, wait_until
from megatron_ds.launch.ranks.distributed import ExitBoard
from megatron_ds.launch.ranks.host_differences import Verdict
from megatron_ds.launch.ranks.roll_call import RollCall
from megatron_ds.launch.watch.hang_watch import (
    EXCHANGE_S,
    HangReport,
    HangWatch,
    exchange_reports,
    hang_problem,
)
from megatron_ds.launch.watch.liveness import ProcessHandle, RankExit, describe_silence

POLL_S = 0.5
"""Interval at which the other processes are checked."""
STORE_S = 2.5 * POLL_S
"""The store lives in rank 0's process: it must outlast the other ranks' next two polls."""
PEER_EXIT_TIMEOUT_S = 10.0
"""Longest wait for a failed rank of the same host to exit before this rank does: most launchers
report the rank that exits first."""


NO_PROGRESS = "no progress"
"""Key of a hang, by which torchrun's attempts are compared."""
REQUESTED_EXITS = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""Statuses of requested exits, for which no rank is blamed."""


@dataclass(frozen=True)
class ExitVerdict:
    """The last message of a rank, and its status."""

    code: ExitCode
    text: str = ""
    is_printed: bool = True
    """Otherwise the message is in the log of the rank only."""
    is_cause: bool = False
    """Whether torchelastic reports the message."""
    failure: str = ""
    """Key for comparing torchrun's attempts; empty: not compared."""


def verdict_of_error(
    report: ErrorReport, start: Verdict | None, first: RankExit | None, *, has_board: bool
) -> ExitVerdict:
    """The verdict of a rank that failed by itself.

    Args:
        report: Its error.
        start: Why the run cannot start on all hosts, from the roll call.
        first: The exit of another rank, if that one posted it before.
        has_board: Whether the ranks know each other. Otherwise only one of a host reports an error
            that all have.
    """
    is_local_first = environment.local_rank() == 0
    is_first = environment.rank() == 0
    if start is not None:
        failure = start.text if is_local_first else ""
        text = output.with_rank_prefix(start.text)
        return ExitVerdict(ExitCode(start.code), text, is_first, True, failure)
    if first is None:
        is_printed = has_board or not report.is_common or is_local_first
        is_compared = is_printed and (report.is_common or report.traceback)
        failure = report.summary if is_compared else ""
        return ExitVerdict(report.code, report.full_text(), is_printed, True, failure)
    if first.reason == report.summary or report.code in REQUESTED_EXITS:
        return ExitVerdict(report.code)
    also = Problem("failed-after-peer", summary=report.summary, peer=first.place)
    return ExitVerdict(report.code, output.with_rank_prefix(also.render()))


def verdict_after_peer(peer: RankExit, *, is_first: bool) -> ExitVerdict:
    """The verdict of a rank that ends because another one has; the first such rank names it."""
    code = ExitCode(peer.code) if peer.code in REQUESTED_EXITS else ExitCode.PEER_LOST
    return ExitVerdict(code, _peer_lost(peer), is_first)


def verdict_of_hang(text: str, first: RankExit | None) -> ExitVerdict:
    """The verdict of a rank of a run that hangs.

    Args:
        text: Where all ranks are, on the rank that reports it.
        first: The announcement of the rank that does, if this one knows it.
    """
    if text:
        text = output.with_rank_prefix(text)
        return ExitVerdict(ExitCode.HUNG, text, is_cause=True, failure=NO_PROGRESS)
    text = _peer_lost(first) if first else ""
    return ExitVerdict(ExitCode.HUNG, text, is_printed=False, failure=NO_PROGRESS)


def _peer_lost(peer: RankExit) -> str:
    problem = Problem("peer-lost", peer=peer.place, reason=peer.reason)
    return output.with_rank_prefix(problem.render())


@dataclass(frozen=True)
class RankEnd:
    """The end of this rank. Called once, by the thread that ends the process."""

    roll_call: RollCall
    launchers: Sequence[ProcessHandle]
    hang_watch: HangWatch = field(default_factory=HangWatch)
    board: ExitBoard | None = None
    """Exit board of all ranks, once they know each other."""
    peers: Mapping[int, ProcessHandle] = field(default_factory=dict)
    """The other ranks of this host."""
    hosts: Mapping[int, str] = field(default_factory=dict)
    """Names of the hosts of ranks, as far as this one knows them."""

    def find_start_verdict(self, report: ErrorReport, lost: int = 0) -> Verdict | None:
        """Asks why the run cannot start on all hosts; None without a verdict, as on one host.

        Args:
            report: Why this rank cannot start.
            lost: Number of ranks that will not come.
        """
        if self.board is not None or report.code in REQUESTED_EXITS:
            return None
        problems = report.problems or [report.traceback + (report.text or report.summary)]
        verdict = self.roll_call.report(problems, report.code, lost)
        return verdict if verdict is not None and verdict.text else None

    def end_by_error(self, report: ErrorReport) -> NoReturn:
        """Ends a rank that failed by itself."""
        start = self.find_start_verdict(report)
        board = self.board
        local = RankExit(environment.rank(), report.summary, report.code)
        posted = local
        if board is not None:
            posted = call_with_timeout(lambda: board.post(local), default=local)
        first = None if posted == local else posted
        verdict = verdict_of_error(report, start, first, has_board=board is not None)
        leave_store = self.roll_call.say_goodbye if start is not None else ignore
        self._end(verdict, leave_store if board is None else functools.partial(time.sleep, STORE_S))

    def end_after_peer(self, peer: RankExit) -> NoReturn:
        """Ends a rank because another one exited. The first rank to do so names that one."""
        if peer.code == ExitCode.HUNG:
            self.end_hung(peer)
        process = self.peers.get(peer.rank)
        board = self.board
        if process is not None:
            wait_until(lambda: not process.is_alive(), PEER_EXIT_TIMEOUT_S)
        is_first = board is None or call_with_timeout(board.is_first_report, default=True)
        self._end(verdict_after_peer(peer, is_first=is_first))

    def end_hung(self, first: RankExit | None) -> NoReturn:
        """Ends a rank of a run that hangs, after it has reported where it is.

        The first rank to announce it collects the reports. A rank that is stopped cannot exit: the
        other ranks of its host end it.

        Args:
            first: The announcement of another rank, if there is one.
        """
        rank = environment.rank()
        watch = self.hang_watch
        board = self.board
        local = RankExit(rank, f"has made no progress for {watch.timeout_s:g} s", ExitCode.HUNG)
        report = watch.write_report(rank)
        stopped = {peer for peer, process in self.peers.items() if process.is_stopped()}
        answers: tuple[list[HangReport], list[int]] | None = None
        if board is not None:
            first = first or call_with_timeout(lambda: board.post(local), default=None)
            if first is not None and first.code != ExitCode.HUNG:
                self.end_after_peer(first)
            if first is not None:
                exchange = functools.partial(
                    exchange_reports, board, report, collects=first == local, without=len(stopped)
                )
                answers = call_with_timeout(exchange, default=None, timeout_s=EXCHANGE_S + 3.0)
        is_first = first == local
        text = ""
        if answers is None:  # the store does not answer: each host reports what it sees
            answers = [report], sorted(stopped | ({0} if board is not None else set()))
            is_first = rank == min({rank, *self.peers} - stopped)
        reports, silent = answers
        if is_first:
            hosts = dict(self.hosts)
            if board is not None:
                ask = functools.partial(board.hosts, silent)
                hosts |= call_with_timeout(ask, default=dict[int, str]())
            states = describe_silence(silent, self.peers, hosts)
            text = hang_problem(reports, states, watch.timeout_s or 0.0).render()

        def end_stopped() -> None:
            time.sleep(STORE_S if rank == 0 else 0.0)
            for peer in stopped.union(self.peers.keys() & silent):
                self.peers[peer].kill()  # at last, for a launcher that reports the first exit

        self._end(verdict_of_hang(text, first), end_stopped)

    def _end(self, verdict: ExitVerdict, then: Callable[[], object] = ignore) -> NoReturn:
        """Prints a verdict, and ends the process after a last call."""
        if verdict.text:
            say(output.print_error if verdict.is_printed else rank_log.note, verdict.text)
        if verdict.is_cause:
            output.write_torchelastic_error_file(verdict.text)
        if verdict.failure:
            self._end_futile_attempts(verdict.failure)
        then()
        end_process(verdict.code)

    def _end_futile_attempts(self, failure: str) -> None:
        """Ends torchrun if one attempt after the other fails equally."""
        failure = f"{self.hang_watch.iteration}: {failure}"
        if self.launchers and attempts.end_if_futile(failure, self.launchers[0]):
            text = Problem("attempts-futile", count=attempts.FUTILE).render()
            say(output.print_error, output.with_rank_prefix(text))
