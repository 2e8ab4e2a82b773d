"""Threads for calls that take long. Must not know what they do."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

TURN_S = 1.0
"""Within which calls run one after another. The next call does not wait longer for this one."""
IDLE_S = 10.0
"""Time for which a thread without a call waits for the next one."""
MAX_THREADS = 16
"""Calls that run at the same time, those that were given up included."""


class _Call:
    """A function that waits for its turn or runs, and the future of its result."""

    def __init__(self, function: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        self.function = function
        self.result = result
        """Cancelled when the call is given up. Belongs to the event loop."""
        self.turn_ends = math.inf
        """Time of the monotonic clock after which the next call waits no longer for this one."""


class WorkerThread:
    """Runs the calls of an event loop, as a rule one after another.

    A thread takes one call after another, so that calls that arrive together do not wait for the
    event loop in between, and then waits a while for more, since most calls take less time than the
    start of a thread.

    Nothing interrupts a call. One that takes long, or that is given up because its time is over or
    because its task is cancelled, runs to its end next to later ones, which another thread takes:
    an exception that is raised in a thread from outside could reach code that works for another
    call, or leave a lock locked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while one of the four following attributes is used."""
        self._waiting = deque[_Call]()
        self._running = set[_Call]()
        """One call of each thread that has one."""
        self._current: _Call | None = None
        """The running call that the waiting ones wait for."""
        self._is_thread_free = False
        """Whether a thread waits for a call; no second one does."""
        self._handed = queue.SimpleQueue[_Call]()
        """The next call of the free thread."""

    @property
    def is_stuck(self) -> bool:
        """Whether no call can run, because of calls that were given up and do not end."""
        with self._lock:
            given_up = sum(call.result.cancelled() for call in self._running)
        return given_up >= MAX_THREADS

    async def call(self, timeout: float, function: Callable[..., Result], *args: object) -> Result:
        """The function's result.

        Args:
            timeout: Seconds until the call is given up, the wait for earlier ones included.
            function: May raise any exception. One that is not an `Exception`, such as the end of a
                program or a panic of Rust code, is converted into a RuntimeError, and so is
                StopIteration, which a coroutine cannot raise.
            args: Its arguments.

        Raises:
            TimeoutError: If it takes longer.
            RuntimeError: If no thread can be started.
        """
        loop = asyncio.get_running_loop()
        call = _Call(partial(function, *args), loop.create_future())
        with self._lock:
            self._waiting.append(call)
        try:
            async with asyncio.timeout(timeout):
                while not call.result.done():
                    turn_s = self._start_next()
                    await asyncio.wait({call.result}, timeout=turn_s)
                result: Result = call.result.result()
                return result
        finally:
            if not call.result.done():
                self._give_up(call)

    def _start_next(self) -> float:
        """Gives a thread the first call that waits, if none is about to take it.

        Returns:
            Seconds after which this is to be called again.

        Raises:
            RuntimeError: If no thread can be started.
        """
        now = time.monotonic()
        with self._lock:
            if self._current is not None and self._current.turn_ends <= now:
                self._current = None
            if self._current is None and self._waiting and len(self._running) < MAX_THREADS:
                call = self._take_next()
                if self._is_thread_free:
                    self._is_thread_free = False
                    self._handed.put(call)
                else:
                    self._start_thread(call)
            return TURN_S if self._current is None else self._current.turn_ends - now

    def _start_thread(self, call: _Call) -> None:
        """Starts a thread with its first call, which waits again if that fails. The lock is held.

        Raises:
            RuntimeError: If no thread can be started.
        """
        try:
            # A daemon, which the end of the process does not wait for.
            threading.Thread(target=self._run, args=(call,), name="reader", daemon=True).start()
        except RuntimeError:
            self._running.discard(call)
            self._current = None
            self._waiting.appendleft(call)
            raise

    def _take_next(self) -> _Call:
        """Makes the first call that waits the current one. The lock is held."""
        call = self._waiting.popleft()
        call.turn_ends = time.monotonic() + TURN_S
        self._running.add(call)
        self._current = call
        return call

    def _run(self, call: _Call) -> None:
        """Runs a call and then those that wait, unless another thread takes them."""
        while True:
            outcome = _outcome(call.function)
            with suppress(RuntimeError):  # the loop has ended
                call.result.get_loop().call_soon_threadsafe(_set_outcome, call.result, *outcome)
            with self._lock:
                self._running.discard(call)
                if self._current is call:
                    self._current = None
                if self._current is None and self._waiting:
                    call = self._take_next()
                    continue
                if self._is_thread_free:
                    return
                self._is_thread_free = True
            del call, outcome  # may be large
            if (handed := self._next_handed()) is None:
                return
            call = handed

    def _next_handed(self) -> _Call | None:
        """The next call of the free thread, which calls this; None if none comes in time."""
        with suppress(queue.Empty):
            return self._handed.get(timeout=IDLE_S)
        with self._lock:
            if self._is_thread_free:
                self._is_thread_free = False
                return None
        return self._handed.get()  # it came just now

    def _give_up(self, call: _Call) -> None:
        """Leaves a call alone: it never runs if it waits, and delays no other one if it runs."""
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
            elif self._current is call:
                self._current = None
            call.result.cancel()
        with suppress(RuntimeError):  # raised again in the call that waits
            self._start_next()


def _set_outcome(
    result: asyncio.Future[Any], value: object | None, error: Exception | None
) -> None:
    if result.cancelled():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)


def _outcome(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Calls a function; returns its result and None, or None and the exception that it raised."""
    try:
        return function(), None
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return None, error
        converted = RuntimeError(f"{type(error).__name__}: {error}")
        converted.__cause__ = error
        return None, converted
