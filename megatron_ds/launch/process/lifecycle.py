"""Process lifecycle: handles signals, launcher loss, peer loss and errors.

A process exits promptly with a message and an `ExitCode`, whatever its main thread is waiting for.
This file knows nothing of training: the training loop reads `stop_request` at the end of a step.

States of a process, and which event leads to which exit::

    STARTING ── on_training_started ──> TRAINING ── on_finished ──> finished, exits by itself
       │                                   │
       ├ signal: raised as an exception    ├ signal or launcher lost: stop request, the loop
       │   (or after GRACE_S by the        │   saves and ends the run
       │   monitor thread): 130, 143       ├ second SIGINT: exits at once: 130
       │                                   ├ no progress: all ranks report where they are: HUNG
       ├ launcher lost: PEER_LOST          │
       └───────────────┬───────────────────┘
                       ├ own error: posted on the exit board, printed: status of the error
                       └ another rank exited: GRACE_S for the main thread to fail by itself,
                         then PEER_LOST (or 130, 143 if that exit was requested)

Three threads take part. The main thread trains; it may hang in a collective that never returns. The
monitor thread wakes up for signals and every POLL_S seconds, and ends the process if the main
thread cannot. The board thread exchanges exits with the ranks of all hosts through the store of the
process group, whose calls may block. Until the ranks have met, two timers report and limit the
wait.
"""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import NoReturn

from megatron_ds.config.problems import Problem, catalogue
from megatron_ds.launch import environment, output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process import error_report
from megatron_ds.launch.process.error_report import ErrorReport
from megatron_ds.launch.process.rank_end import POLL_S, RankEnd
from megatron_ds.launch.process.stop_request import SIGNALS, StopReason, StopRequest
from megatron_ds.launch.process.time_limits import call_with_timeout, end_process, say, wait_until
from megatron_ds.launch.ranks import launched_hosts
from megatron_ds.launch.ranks.distributed import ExitBoard, destroy_process_group
from megatron_ds.launch.ranks.launched_hosts import LaunchWatch
from megatron_ds.launch.ranks.roll_call import ANSWER_S, FAILURE_GRACE_S, RollCall
from megatron_ds.launch.watch.hang_watch import (
    HangWatch,
)
from megatron_ds.launch.watch.host_watch import HostWatch
from megatron_ds.launch.watch.liveness import (
    ProcessHandle,
    RankExit,
    find_dead_peer,
    find_launchers,
)

GRACE_S = 3.0
"""Time for the main thread to leave a collective after a peer was lost, or start-up after a signal,
before the monitor thread ends the process."""
BLAME_TIMEOUT_S = 3.0
"""Time to find the rank that caused a failed collective."""
SECOND_SIGINT_S = 1.0
"""A SIGINT this long after the first one is another Ctrl-C; an earlier one is the same Ctrl-C, sent
by the terminal to all processes and passed on by the launcher."""
STORE_GONE = "or its launcher has exited: the store of the run does not answer"
STORE_LOST = RankExit(0, STORE_GONE, ExitCode.PEER_LOST, host="")


class _StartupInterrupted(SystemExit):
    """Raised in the main thread by a signal during start-up."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(int(reason.exit_code))
        self.reason = reason


class ProcessLifecycle:
    """Lifecycle of one rank, from its first line to its exit status.

    Must be created in the main thread.
    """

    def __init__(self) -> None:
        self.stop_request = StopRequest()
        self.roll_call = RollCall()
        """Roll call of the ranks before they know each other."""
        self.hang_watch = HangWatch()
        """Replaced before the ranks know each other, if the run has --hang-timeout."""
        self.host_watch = HostWatch()
        """Replaced when the ranks know each other."""
        self.started_at = time.monotonic()
        # While starting there is no state to lose: a signal ends the process.
        self._starting = True
        self._saves = False
        self._end = RankEnd(self.roll_call, find_launchers())
        self._launch_watch = LaunchWatch()
        self._peer_exit: RankExit | None = None
        self._peer_exit_at = 0.0
        self._signalled_at: float | None = None
        self._store_lost = False
        # Signal handlers are inherited by forked data loaders, where they must not raise.
        self._interruptible_pid = os.getpid()
        self._finished = threading.Event()
        # Held while the monitor thread checks other processes.
        self._checks = threading.Lock()
        self._board_thread: threading.Thread | None = None
        self._wakeup, self._wakeup_writer = socket.socketpair()
        # Held by the thread that ends the process; never released.
        self._exit_lock = threading.Lock()
        self._has_left = threading.Event()
        self._wakeup_before = -1

    def begin(self) -> None:
        """Installs signal handlers and starts the monitor thread.

        Signals that the parent process ignores (nohup) stay ignored.
        """
        catalogue()  # a process that fails may no longer be able to open files
        self._wakeup_writer.setblocking(False)
        writer = self._wakeup_writer.fileno()
        self._wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        for signum in SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._on_signal)
        threading.Thread(target=self._monitor, name="monitor", daemon=True).start()

    @contextmanager
    def rendezvous(self, timeout: timedelta) -> Iterator[None]:
        """Around the wait for the other ranks: ends the process if the wait does not end.

        torch's client of the store waits indefinitely for a server that does not answer.

        Args:
            timeout: Time after which torch reports missing ranks.
        """
        size = environment.world_size()
        address = environment.rendezvous()
        others = f"the {size} processes of the run at MASTER_ADDR:MASTER_PORT = {address}"
        end = min(timeout.total_seconds() + GRACE_S, threading.TIMEOUT_MAX)
        # If one host is slow, many ranks wait for it: they report it one after the other.
        waiting = output.waiting_for(others, 1.0 + environment.local_rank())
        with output.calling_after(end, self._end_rendezvous, timeout), waiting:
            yield

    def limited_start(self, timeout: timedelta) -> AbstractContextManager[None]:
        """Context for the start, before the ranks watch each other, that ends the process if the
        first rank becomes silent.

        Args:
            timeout: Time limit for all ranks to arrive, and again for them to connect.
        """
        end = 2 * timeout.total_seconds() + ANSWER_S + FAILURE_GRACE_S + GRACE_S
        seconds = min(end, threading.TIMEOUT_MAX)
        return output.calling_after(seconds, self._end_rendezvous, timeout)

    def on_group_joined(
        self, board: ExitBoard | None, peers: Mapping[int, ProcessHandle], hosts: Mapping[int, str]
    ) -> None:
        """Starts watching the other ranks.

        Args:
            board: Exit board of all ranks; None for a run of one process.
            peers: The other ranks of this host.
            hosts: Names of the hosts of ranks, as far as this one knows them.
        """
        self._end = dataclasses.replace(
            self._end, hang_watch=self.hang_watch, board=board, peers=peers, hosts=hosts
        )
        if board is not None:
            self._board_thread = threading.Thread(
                target=self._watch_board, args=(board,), daemon=True
            )
            self._board_thread.start()

    def on_training_started(self, *, saves: bool) -> None:
        """Treats further signals as requests to stop after the current step.

        Args:
            saves: Whether the run saves a checkpoint then.
        """
        self._starting = False
        self._saves = saves
        self.host_watch.is_starting = False

    def on_finished(self) -> None:
        """All ranks are done: from now on the exit of another rank is not an error."""
        _ignore_signals()
        self._finished.set()
        # The interpreter aborts at exit if a thread is still inside the store's C++ code.
        self._checks.acquire(timeout=GRACE_S)
        if self._board_thread is not None:
            self._board_thread.join(GRACE_S)

    def leave(self) -> None:
        """Stops watching: the process goes on with something else."""
        self._finished.set()
        self._has_left.set()
        signal.set_wakeup_fd(self._wakeup_before)

    def exit_with_error(self, error: BaseException) -> NoReturn:
        """Reports the error, informs the other ranks and ends this process.

        Skips the interpreter's clean-up, which would wait for ranks that are gone. A `sys.exit`
        that no other rank waits for is raised again.
        """
        interruption = _interruption(error)
        if (
            interruption is None
            and isinstance(error, SystemExit)
            and (self._finished.is_set() or self._end.board is None)
        ):
            raise error
        self._interruptible_pid = 0
        report = error_report.make_report(error)
        if interruption is not None:
            report = error_report.startup_report(interruption.reason)
        watch = self.host_watch
        if suspended := watch.was_suspended and error_report.is_collective_error(error):
            report = error_report.suspension_report(watch.suspended_s)
        self._end.find_start_verdict(report)  # which may take long: a signal still ends the process
        self._exit_lock.acquire()  # blocks if the monitor thread is already ending the process
        _ignore_signals()
        failed_peer = None if suspended else self._find_failed_peer(error)
        if failed_peer is not None:
            self._end.end_after_peer(failed_peer)
        self._end.end_by_error(report)

    def _end_rendezvous(self, timeout: timedelta) -> None:
        if self._exit_lock.acquire(blocking=False):
            self.roll_call.is_over = True
            error = f"nothing there answered as a run of this program within {timeout}"
            self._end.end_by_error(error_report.rendezvous_report(error))

    def _check_hang(self) -> None:
        """Ends the process if it is overdue, or if another rank has reported that it is."""
        peer = self._peer_exit
        seconds = self.hang_watch.overdue_s()
        announced = peer is not None and peer.code == ExitCode.HUNG
        if (announced or seconds) and self._exit_lock.acquire(blocking=False):
            self._end.end_hung(peer if announced else None)

    def _find_failed_peer(self, error: BaseException) -> RankExit | None:
        """The rank whose exit made a collective of this one fail; None if the error is our own."""
        if not error_report.is_collective_error(error):
            return None
        wait_until(lambda: self._check_peers() is not None, BLAME_TIMEOUT_S)
        return self._peer_exit or (STORE_LOST if self._store_lost else None)

    def _on_signal(self, signum: int, frame: object) -> None:
        # After start-up the monitor thread handles signals: it reads their numbers from the
        # wakeup socket even while the main thread is blocked in a collective.
        if self._starting and os.getpid() == self._interruptible_pid:
            self._interruptible_pid = 0
            raise _StartupInterrupted(SIGNALS[signum])

    def _monitor(self) -> None:
        """Ends the process if a check fails: without the checks, nothing might end it."""
        try:
            self._monitor_loop()
        except Exception as error:
            say(output.print_error, error_report.make_report(error).full_text())
            end_process(ExitCode.ERROR)

    def _monitor_loop(self) -> None:
        while not self._has_left.is_set():
            readable, _, _ = select.select([self._wakeup], [], [], POLL_S)
            for signum in self._wakeup.recv(64) if readable else b"":
                if signum in SIGNALS:
                    self._on_signal_received(SIGNALS[signum])
            with self._checks:
                if not self._finished.is_set():
                    self._check_launchers()
                    self._check_hosts()
                    self._check_peers()
                    self._check_store()
                    self._check_hang()
                    self._kill_if_stuck()

    def _on_signal_received(self, reason: StopReason) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self.stop_request.request(reason)
            if not self._starting and self._check_peers() is None:
                plan = "saving a checkpoint after this step, then exiting"
                if not self._saves:
                    plan = "exiting after this step; nothing is saved without --save"
                again = " (press again to exit at once)" if reason is StopReason.SIGINT else ""
                say(output.print_on_rank, f"received {reason.signal}: {plan}{again}")
        elif reason is StopReason.SIGINT and now - self._signalled_at > SECOND_SIGINT_S:
            self._exit_lock.acquire(blocking=False)  # even if another thread is ending the process
            summary = "was ended by a second Ctrl-C"
            text = Problem("ended-without-saving", summary=summary).render()
            self._end.end_by_error(ErrorReport(summary, reason.exit_code, text))

    def _check_launchers(self) -> None:
        launchers_alive = all(process.is_alive() for process in self._end.launchers)
        if self.stop_request.reason is None and not launchers_alive:
            self.stop_request.request(StopReason.LAUNCHER)
            if self._starting and self._exit_lock.acquire(blocking=False):
                say(output.print_error, output.with_rank_prefix(Problem("launcher-lost").render()))
                end_process(ExitCode.PEER_LOST)

    def _check_hosts(self) -> None:
        """Ends the run if the launcher has lost a host before its ranks have come."""
        lost = self._launch_watch.find_lost_ranks() if self.roll_call.is_waiting else []
        if lost and self._exit_lock.acquire(blocking=False):
            text = Problem("ssh-ended", missing=launched_hosts.describe(lost)).render()
            report = ErrorReport("lost a host", ExitCode.HOSTS_DIFFER, text)
            self._end.find_start_verdict(report, lost=len(lost))
            self._end.end_by_error(report)

    def _check_peers(self) -> RankExit | None:
        """The exit of another rank, as far as this one knows."""
        board = self._end.board
        if self._peer_exit is None and board is not None:
            dead = find_dead_peer(self._end.peers)
            if dead is not None:
                # The dead rank may have posted its reason, or another one may have exited first.
                posted = call_with_timeout(board.read, default=None)
                self._record_peer_exit(posted or dead)
        return self._peer_exit

    def _check_store(self) -> None:
        """Notices that the store is silent. If it is gone, the ranks may still be able to save."""
        lost = self.host_watch.poll()
        if lost is not None and not self._store_lost:
            self._record_peer_exit(lost)
            self._peer_exit_at -= GRACE_S  # no collective would fail by itself

    def _record_peer_exit(self, peer: RankExit) -> None:
        if self._peer_exit is None and peer.rank != environment.rank():
            self._peer_exit_at = time.monotonic()
            self._peer_exit = peer

    def _kill_if_stuck(self) -> None:
        """Ends the process if the main thread has not done so within the grace period."""
        deadline = time.monotonic() - GRACE_S
        peer = self._peer_exit
        reason = self.stop_request.reason
        lost_peer = peer is not None and self._peer_exit_at < deadline
        late = self._signalled_at is not None and self._signalled_at < deadline
        if (lost_peer or (self._starting and late)) and self._exit_lock.acquire(blocking=False):
            if peer is not None:
                self._end.end_after_peer(peer)
            if reason is not None:
                self._end.end_by_error(error_report.startup_report(reason))

    def _watch_board(self, board: ExitBoard) -> None:
        """Reads the board, and posts what this rank observes: ranks of other hosts cannot see the
        processes of this one."""
        while not self._finished.is_set():
            try:
                lost = self.host_watch.exchange(board)
                if lost is not None:
                    self._record_peer_exit(lost)
                rank_exit = board.read()
                if rank_exit is None and self._peer_exit is not None:
                    rank_exit = board.post(self._peer_exit)
                if rank_exit is not None:
                    self._record_peer_exit(rank_exit)
                    return
            except (RuntimeError, OSError):
                # Rank 0 or its launcher is gone. The ranks themselves may still be able to save.
                self._store_lost = True
                if self._starting:
                    self._record_peer_exit(STORE_LOST)
                self.stop_request.request(StopReason.LAUNCHER)
                return
            self._finished.wait(POLL_S)


@contextmanager
def process_lifecycle() -> Iterator[ProcessLifecycle]:
    """Runs the body as a rank: any exception ends the process with a message and a status."""
    lifecycle = ProcessLifecycle()
    try:
        lifecycle.begin()  # a signal may arrive before it returns
        yield lifecycle
    except BaseException as error:
        lifecycle.exit_with_error(error)


@contextmanager
def guest_lifecycle() -> Iterator[ProcessLifecycle]:
    """Runs the body as the only rank of a run inside of a program that goes on, such as a notebook.

    Exceptions are raised, signals have their handlers again afterwards, and the variables of ranks
    their values. Ctrl-C ends the run after the step, with a checkpoint.

    Raises:
        KeyboardInterrupt: At Ctrl-C before the first step.
    """
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    lifecycle = ProcessLifecycle()
    with environment.unchanged_ranks():
        try:
            lifecycle.begin()
            yield lifecycle
        except _StartupInterrupted:
            raise KeyboardInterrupt from None
        finally:
            lifecycle.leave()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            destroy_process_group()


def _interruption(error: BaseException | None) -> _StartupInterrupted | None:
    """The signal that an error comes from.

    It arrives in the middle of an import, where Python 3.11 turns what `__set_name__` raises into a
    RuntimeError.
    """
    while error is not None and not isinstance(error, _StartupInterrupted):
        error = error.__cause__ or error.__context__
    return error


def _ignore_signals() -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
