"""How a process of a run comes to its end: signals, a lost launcher, lost ranks, errors; in words,
with a status of `ExitCode`, and soon.

A thread of its own does what cannot wait for the main one, which may be inside a collective that
never returns. Knows nothing of training: the loop asks `Life.stop` at the end of a step.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from typing import NoReturn, TypeVar

from megatron_ds.launch import environment, output
from megatron_ds.launch.error_report import ErrorReport, is_collective_error, make_report
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.liveness import (
    ExitBoard,
    ProcessHandle,
    RankExit,
    find_dead_peer,
    find_launchers,
)

Answer = TypeVar("Answer")

POLL_S = 0.5
"""Seconds between two looks at the other processes."""
GRACE_S = 3.0
"""Seconds for the main thread to get out of a collective by itself when a rank is lost, or out of
whatever it does at the start when a signal came."""
ACK_TIMEOUT_S = 10.0
"""Seconds at most for the other ranks to hear why this one ends: they listen twice a second."""
BLAME_TIMEOUT_S = 3.0
"""Seconds in which it becomes known who is behind a failed collective, or nobody is."""
EXIT_DELAY_S = 1.5
"""Seconds by which those that were left alone end later than the one that left them: a launcher
that looks once a second then blames the right one."""
REQUESTED_EXITS = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""Statuses of ends that were asked for: no rank is to blame."""
NO_STORE = RankExit(
    0, "or its launcher is gone: the store of the run does not answer", ExitCode.PEER_LOST
)
SECOND_SIGINT_S = 1.0
"""A second SIGINT so much later is another Ctrl-C; before, it is the launcher passing on the one
that the terminal sent to all."""


class StopReason(Enum):
    """Why the run was asked from outside to end; the first one to apply is told."""

    SIGINT = "after receiving SIGINT."
    SIGTERM = "after receiving SIGTERM."
    LAUNCHER = "since its launcher is gone."

    @property
    def code(self) -> ExitCode:
        return ExitCode.INTERRUPTED if self is StopReason.SIGINT else ExitCode.TERMINATED


SIGNALS = {signal.SIGINT: StopReason.SIGINT, signal.SIGTERM: StopReason.SIGTERM}


class StopRequest:
    """A request to end, made from outside; the loop asks for it when it can end in order."""

    def __init__(self) -> None:
        self.cause: StopReason | None = None

    def request(self, cause: StopReason) -> None:
        if self.cause is None:
            self.cause = cause


class ProcessPhase(Enum):
    STARTING = "nothing is lost by an end: a signal ends the process"
    TRAINING = "a signal is a request, heard at the end of the step"


class _StartupInterrupted(SystemExit):
    """Takes the main thread out of what it does at the start."""

    def __init__(self, cause: StopReason) -> None:
        super().__init__(int(cause.code))
        self.cause = cause


def _stopped(cause: StopReason) -> ErrorReport:
    done = f"was stopped by {cause.name} before the training began"
    text = f"{done}: nothing was trained, nothing is lost"
    return ErrorReport(done, cause.code, text, is_of_all=True)


class ProcessLifecycle:
    """One process, from its first line to its exit status. To be made in the main thread."""

    def __init__(self) -> None:
        self.stop = StopRequest()
        self.began = time.monotonic()
        self._phase = ProcessPhase.STARTING
        self._launchers = find_launchers()
        self._peers: Mapping[int, ProcessHandle] = {}
        self._board: ExitBoard | None = None
        self._left_by: RankExit | None = None
        self._left_at = 0.0
        self._signalled_at: float | None = None
        self._without_store = False
        self._interruptible_in = os.getpid()
        """Where a signal is an exception: not in processes that are forked from this one."""
        self._over = threading.Event()
        self._listener: threading.Thread | None = None
        self._wakeup, self._woken_by = socket.socketpair()
        self._ends = threading.Lock()
        """Held by the thread that ends the process."""

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def is_shared(self) -> bool:
        """Whether other ranks know of this one."""
        return self._board is not None

    def begin(self) -> None:
        """Takes the signals over, but those that whoever started us had made us ignore."""
        self._woken_by.setblocking(False)
        signal.set_wakeup_fd(self._woken_by.fileno(), warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget_wakeup)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        threading.Thread(target=self._monitor_loop, name="guard", daemon=True).start()

    def on_group_joined(self, board: ExitBoard | None, peers: Mapping[int, ProcessHandle]) -> None:
        """From here on this rank notices when another one is gone.

        board: of all ranks; None for a run of one. peers: the other ranks of this machine.
        """
        self._board, self._peers = board, peers
        if board is not None:
            self._listener = threading.Thread(target=self._watch_board, args=(board,), daemon=True)
            self._listener.start()

    def on_training_started(self) -> None:
        """From here on a signal is a request."""
        self._phase = ProcessPhase.TRAINING

    def on_finished(self) -> None:
        """All ranks are through: any of them may be gone at any moment."""
        _ignore_signals()
        self._over.set()
        if self._listener is not None:
            # The interpreter's clean-up would abort it if it caught it inside the store's library.
            self._listener.join(GRACE_S)

    def exit_with_error(self, error: BaseException) -> NoReturn:
        """Says why this process ends, tells the others, and ends it.

        Without the interpreter's clean-up, which would wait for ranks that are gone.
        """
        self._interruptible_in = 0
        self._ends.acquire()  # for ever, if the guard is ending the process already
        _ignore_signals()
        culprit = self._find_failed_peer(error)
        if culprit is not None:
            self._exit_after_peer(culprit)
        self._exit_as_cause(
            _stopped(error.cause) if isinstance(error, _StartupInterrupted) else make_report(error)
        )

    def _exit_as_cause(self, report: ErrorReport) -> NoReturn:
        """Ends a rank that failed by itself."""
        ending = RankExit(environment.rank(), report.words, report.code)
        board, first = self._board, ending
        if board is not None:
            first = _call_with_timeout(lambda: board.post(ending), otherwise=ending)
        if first == ending:
            if board is not None or not report.is_of_all or environment.local_rank() == 0:
                output.print_error(report.full_text())
            output.write_torchelastic_error_file(report.full_text())
        elif first.words != report.words and report.code not in REQUESTED_EXITS:
            output.print_error(
                output.with_rank_prefix(f"{report.words} (as rank {first.rank}, before)")
            )
        if board is not None:
            _wait(lambda: self._all_acknowledged(board), ACK_TIMEOUT_S)
        _end_process(report.code)

    def _all_acknowledged(self, board: ExitBoard) -> bool:
        """Whether there is nobody left to wait for; also if the board is gone."""
        others = environment.world_size() - 1
        return _call_with_timeout(lambda: board.count("heard", 0), otherwise=others) >= others

    def _exit_after_peer(self, culprit: RankExit) -> NoReturn:
        """Ends a rank that another one left alone. The first of them names it."""
        process, board = self._peers.get(culprit.rank), self._board
        if process is not None:
            _wait(lambda: not process.alive(), ACK_TIMEOUT_S)
        time.sleep(EXIT_DELAY_S)
        if board is None or _call_with_timeout(lambda: board.count("left", 1), otherwise=1) == 1:
            output.print_error(
                output.with_rank_prefix(f"ends, because rank {culprit.rank} {culprit.words}")
            )
        _end_process(
            ExitCode(culprit.code) if culprit.code in REQUESTED_EXITS else ExitCode.PEER_LOST
        )

    def _find_failed_peer(self, error: BaseException) -> RankExit | None:
        """The rank whose end let a collective of this one fail; None if the error is our own."""
        if not is_collective_error(error):
            return None
        _wait(lambda: self._check_peers() is not None, BLAME_TIMEOUT_S)
        return self._left_by or (NO_STORE if self._without_store else None)

    def _on_signal(self, number: int, frame: object) -> None:
        # Later than at the start it is the guard that deals with it, which gets the number as well.
        if self._phase is ProcessPhase.STARTING and os.getpid() == self._interruptible_in:
            self._interruptible_in = 0
            raise _StartupInterrupted(SIGNALS[signal.Signals(number)])

    def _monitor_loop(self) -> None:
        while True:
            readable, _, _ = select.select([self._wakeup], [], [], POLL_S)
            for number in self._wakeup.recv(64) if readable else b"":
                if number in list(SIGNALS):
                    self._on_signal_received(SIGNALS[signal.Signals(number)])
            if not self.is_over:
                self._check_launchers()
                self._check_peers()
                self._kill_if_stuck()

    def _on_signal_received(self, cause: StopReason) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self.stop.request(cause)
            if self._phase is ProcessPhase.TRAINING and self._check_peers() is None:
                output.print_on_rank(
                    f"received {cause.name}: the run ends after this step, with its state saved "
                    "(a further SIGINT ends it at once)"
                )
        elif cause is StopReason.SIGINT and now - self._signalled_at > SECOND_SIGINT_S:
            self._ends.acquire(blocking=False)  # whatever else is going on
            done = "was ended at once by a further SIGINT"
            self._exit_as_cause(ErrorReport(done, cause.code, f"{done}: nothing more was saved"))

    def _check_launchers(self) -> None:
        if self.stop.cause is None and not all(process.alive() for process in self._launchers):
            self.stop.request(StopReason.LAUNCHER)
            if self._phase is ProcessPhase.STARTING and self._ends.acquire(blocking=False):
                output.print_error(
                    output.with_rank_prefix("its launcher is gone: ends before the training")
                )
                _end_process(ExitCode.PEER_LOST)

    def _check_peers(self) -> RankExit | None:
        """What ended another rank, as far as this one knows."""
        board = self._board
        if self._left_by is None and board is not None:
            gone = find_dead_peer(self._peers)
            if gone is not None:
                # It may have left word, and another one before it.
                self._record_peer_exit(
                    _call_with_timeout(lambda: board.read(), otherwise=None) or gone
                )
        return self._left_by

    def _record_peer_exit(self, found: RankExit) -> None:
        if self._left_by is None and found.rank != environment.rank():
            self._left_at = time.monotonic()
            self._left_by = found

    def _kill_if_stuck(self) -> None:
        """What the main thread is to do by itself, if it has not come to it within the grace."""
        late = time.monotonic() - GRACE_S
        starts, left_by, cause = (
            self._phase is ProcessPhase.STARTING,
            self._left_by,
            self.stop.cause,
        )
        left = left_by is not None and self._left_at < late
        signalled = starts and self._signalled_at is not None and self._signalled_at < late
        if (left or signalled) and self._ends.acquire(blocking=False):
            if left_by is not None:
                self._exit_after_peer(left_by)
            if cause is not None:
                self._exit_as_cause(_stopped(cause))

    def _watch_board(self, board: ExitBoard) -> None:
        """Reads the board, and writes there what this rank finds out: the ranks of other machines
        have nothing else to go by."""
        while not self.is_over:
            try:
                found = board.read()
                if found is None and self._left_by is not None:
                    found = board.post(self._left_by)
                if found is not None:
                    self._record_peer_exit(found)
                    if found.rank != environment.rank():
                        board.count("heard", 1)
                    return
            except (RuntimeError, OSError):
                # Its rank or launcher is gone. The ranks may be well all the same, and save.
                self._without_store = True
                self.stop.request(StopReason.LAUNCHER)
                return
            self._over.wait(POLL_S)


@contextmanager
def process_lifecycle() -> Iterator[ProcessLifecycle]:
    """The life of a process that is a rank. Whatever ends it comes out as words and a status."""
    life = ProcessLifecycle()
    life.begin()
    try:
        yield life
    except BaseException as error:
        in_order = isinstance(error, SystemExit) and not isinstance(error, _StartupInterrupted)
        if in_order and (life.is_over or not life.is_shared):
            raise
        life.exit_with_error(error)


def _wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.05)


def _call_with_timeout(question: Callable[[], Answer], *, otherwise: Answer) -> Answer:
    """The answer of something that may fail, or never answer at all."""
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def run() -> None:
        with suppress(RuntimeError, OSError):
            answers.put(question())
            return
        answers.put(otherwise)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answers.get(timeout=1.0)
    except queue.Empty:
        return otherwise


def _ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _forget_wakeup() -> None:
    signal.set_wakeup_fd(-1)


def _end_process(code: ExitCode) -> NoReturn:
    """Ends this process and those that it started (the data loaders), from any thread."""
    for child in multiprocessing.active_children():
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as one is that was closed from the start
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)
