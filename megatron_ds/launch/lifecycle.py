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
from megatron_ds.launch.error_report import Report, is_of_a_collective, report_on
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.liveness import Board, Ending, Process, launchers, lost

Answer = TypeVar("Answer")

TICK = 0.5
"""Seconds between two looks at the other processes."""
GRACE = 3.0
"""Seconds for the main thread to get out of a collective by itself when a rank is lost, or out of
whatever it does at the start when a signal came."""
HEARD = 10.0
"""Seconds at most for the other ranks to hear why this one ends: they listen twice a second."""
EVIDENCE = 3.0
"""Seconds in which it becomes known who is behind a failed collective, or nobody is."""
CULPRIT_FIRST = 1.5
"""Seconds by which those that were left alone end later than the one that left them: a launcher
that looks once a second then blames the right one."""
QUIET = (ExitCode.INTERRUPTED, ExitCode.TERMINATED)
"""Statuses of ends that were asked for: no rank is to blame."""
NO_STORE = Ending(0, "or its launcher is gone: the store of the run does not answer", ExitCode.LOST)
INSISTS = 1.0
"""A second SIGINT so much later is another Ctrl-C; before, it is the launcher passing on the one
that the terminal sent to all."""


class Cause(Enum):
    """Why the run was asked from outside to end; the first one to apply is told."""

    SIGINT = "after receiving SIGINT."
    SIGTERM = "after receiving SIGTERM."
    LAUNCHER = "since its launcher is gone."

    @property
    def code(self) -> ExitCode:
        return ExitCode.INTERRUPTED if self is Cause.SIGINT else ExitCode.TERMINATED


SIGNALS = {signal.SIGINT: Cause.SIGINT, signal.SIGTERM: Cause.SIGTERM}


class Stop:
    """A request to end, made from outside; the loop asks for it when it can end in order."""

    def __init__(self) -> None:
        self.cause: Cause | None = None

    def request(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause = cause


class Phase(Enum):
    STARTING = "nothing is lost by an end: a signal ends the process"
    TRAINING = "a signal is a request, heard at the end of the step"


class _Interrupted(SystemExit):
    """Takes the main thread out of what it does at the start."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(int(cause.code))
        self.cause = cause


def _stopped(cause: Cause) -> Report:
    done = f"was stopped by {cause.name} before the training began"
    text = f"{done}: nothing was trained, nothing is lost"
    return Report(done, cause.code, text, is_of_all=True)


class Life:
    """One process, from its first line to its exit status. To be made in the main thread."""

    def __init__(self) -> None:
        self.stop = Stop()
        self.began = time.monotonic()
        self._phase = Phase.STARTING
        self._launchers = launchers()
        self._peers: Mapping[int, Process] = {}
        self._board: Board | None = None
        self._left_by: Ending | None = None
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
        threading.Thread(target=self._guard, name="guard", daemon=True).start()

    def joined(self, board: Board | None, peers: Mapping[int, Process]) -> None:
        """From here on this rank notices when another one is gone.

        board: of all ranks; None for a run of one. peers: the other ranks of this machine.
        """
        self._board, self._peers = board, peers
        if board is not None:
            self._listener = threading.Thread(target=self._listen, args=(board,), daemon=True)
            self._listener.start()

    def training(self) -> None:
        """From here on a signal is a request."""
        self._phase = Phase.TRAINING

    def finished(self) -> None:
        """All ranks are through: any of them may be gone at any moment."""
        _ignore_signals()
        self._over.set()
        if self._listener is not None:
            # The interpreter's clean-up would abort it if it caught it inside the store's library.
            self._listener.join(GRACE)

    def fail(self, error: BaseException) -> NoReturn:
        """Says why this process ends, tells the others, and ends it.

        Without the interpreter's clean-up, which would wait for ranks that are gone.
        """
        self._interruptible_in = 0
        self._ends.acquire()  # for ever, if the guard is ending the process already
        _ignore_signals()
        culprit = self._culprit_behind(error)
        if culprit is not None:
            self._follow(culprit)
        self._lead(_stopped(error.cause) if isinstance(error, _Interrupted) else report_on(error))

    def _lead(self, report: Report) -> NoReturn:
        """Ends a rank that failed by itself."""
        ending = Ending(environment.rank(), report.words, report.code)
        board, first = self._board, ending
        if board is not None:
            first = _ask(lambda: board.post(ending), otherwise=ending)
        if first == ending:
            if board is not None or not report.is_of_all or environment.local_rank() == 0:
                output.complain(report.in_full())
            output.note_for_launcher(report.in_full())
        elif first.words != report.words and report.code not in QUIET:
            output.complain(output.signed(f"{report.words} (as rank {first.rank}, before)"))
        if board is not None:
            _wait(lambda: self._all_heard(board), HEARD)
        _end_process(report.code)

    def _all_heard(self, board: Board) -> bool:
        """Whether there is nobody left to wait for; also if the board is gone."""
        others = environment.world_size() - 1
        return _ask(lambda: board.count("heard", 0), otherwise=others) >= others

    def _follow(self, culprit: Ending) -> NoReturn:
        """Ends a rank that another one left alone. The first of them names it."""
        process, board = self._peers.get(culprit.rank), self._board
        if process is not None:
            _wait(lambda: not process.alive(), HEARD)
        time.sleep(CULPRIT_FIRST)
        if board is None or _ask(lambda: board.count("left", 1), otherwise=1) == 1:
            output.complain(output.signed(f"ends, because rank {culprit.rank} {culprit.words}"))
        _end_process(ExitCode(culprit.code) if culprit.code in QUIET else ExitCode.LOST)

    def _culprit_behind(self, error: BaseException) -> Ending | None:
        """The rank whose end let a collective of this one fail; None if the error is our own."""
        if not is_of_a_collective(error):
            return None
        _wait(lambda: self._look_around() is not None, EVIDENCE)
        return self._left_by or (NO_STORE if self._without_store else None)

    def _on_signal(self, number: int, frame: object) -> None:
        # Later than at the start it is the guard that deals with it, which gets the number as well.
        if self._phase is Phase.STARTING and os.getpid() == self._interruptible_in:
            self._interruptible_in = 0
            raise _Interrupted(SIGNALS[signal.Signals(number)])

    def _guard(self) -> None:
        while True:
            readable, _, _ = select.select([self._wakeup], [], [], TICK)
            for number in self._wakeup.recv(64) if readable else b"":
                if number in list(SIGNALS):
                    self._hear(SIGNALS[signal.Signals(number)])
            if not self.is_over:
                self._look_at_launchers()
                self._look_around()
                self._end_what_hangs()

    def _hear(self, cause: Cause) -> None:
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
            self.stop.request(cause)
            if self._phase is Phase.TRAINING and self._look_around() is None:
                output.say(
                    f"received {cause.name}: the run ends after this step, with its state saved "
                    "(a further SIGINT ends it at once)"
                )
        elif cause is Cause.SIGINT and now - self._signalled_at > INSISTS:
            self._ends.acquire(blocking=False)  # whatever else is going on
            done = "was ended at once by a further SIGINT"
            self._lead(Report(done, cause.code, f"{done}: nothing more was saved"))

    def _look_at_launchers(self) -> None:
        if self.stop.cause is None and not all(process.alive() for process in self._launchers):
            self.stop.request(Cause.LAUNCHER)
            if self._phase is Phase.STARTING and self._ends.acquire(blocking=False):
                output.complain(output.signed("its launcher is gone: ends before the training"))
                _end_process(ExitCode.LOST)

    def _look_around(self) -> Ending | None:
        """What ended another rank, as far as this one knows."""
        board = self._board
        if self._left_by is None and board is not None:
            gone = lost(self._peers)
            if gone is not None:
                # It may have left word, and another one before it.
                self._note(_ask(lambda: board.read(), otherwise=None) or gone)
        return self._left_by

    def _note(self, found: Ending) -> None:
        if self._left_by is None and found.rank != environment.rank():
            self._left_at = time.monotonic()
            self._left_by = found

    def _end_what_hangs(self) -> None:
        """What the main thread is to do by itself, if it has not come to it within the grace."""
        late = time.monotonic() - GRACE
        starts, left_by, cause = self._phase is Phase.STARTING, self._left_by, self.stop.cause
        left = left_by is not None and self._left_at < late
        signalled = starts and self._signalled_at is not None and self._signalled_at < late
        if (left or signalled) and self._ends.acquire(blocking=False):
            if left_by is not None:
                self._follow(left_by)
            if cause is not None:
                self._lead(_stopped(cause))

    def _listen(self, board: Board) -> None:
        """Reads the board, and writes there what this rank finds out: the ranks of other machines
        have nothing else to go by."""
        while not self.is_over:
            try:
                found = board.read()
                if found is None and self._left_by is not None:
                    found = board.post(self._left_by)
                if found is not None:
                    self._note(found)
                    if found.rank != environment.rank():
                        board.count("heard", 1)
                    return
            except (RuntimeError, OSError):
                # Its rank or launcher is gone. The ranks may be well all the same, and save.
                self._without_store = True
                self.stop.request(Cause.LAUNCHER)
                return
            self._over.wait(TICK)


@contextmanager
def ends_well() -> Iterator[Life]:
    """The life of a process that is a rank. Whatever ends it comes out as words and a status."""
    life = Life()
    life.begin()
    try:
        yield life
    except BaseException as error:
        in_order = isinstance(error, SystemExit) and not isinstance(error, _Interrupted)
        if in_order and (life.is_over or not life.is_shared):
            raise
        life.fail(error)


def _wait(until: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        time.sleep(0.05)


def _ask(question: Callable[[], Answer], *, otherwise: Answer) -> Answer:
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
