"""Threads for calls that take long. Must not know what they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")

TURN_S = 1.0
"""Within which calls run one after another. The next call does not wait longer for this one."""
MAX_THREADS = 16
"""Calls that run at the same time, those that were given up included."""


class WorkerThread:
    """Runs the calls of an event loop, as a rule one after another.

    Each call has a thread of its own, which nothing interrupts and which ends with the call. A call
    that is given up, because its time is over or because its task is cancelled, runs to its end
    next to later ones: an exception that is raised in a thread from outside could reach code that
    works for another call, or leave a lock locked.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._free = asyncio.Semaphore(MAX_THREADS)
        self._running = set[asyncio.Future[Any]]()
        """Results of calls whose threads run; cancelled ones are of calls that were given up."""

    @property
    def is_stuck(self) -> bool:
        """Whether no call can run, because of calls that were given up and do not end."""
        given_up = sum(result.cancelled() for result in self._running)
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
        async with asyncio.timeout(timeout):
            async with self._turn:
                await self._free.acquire()
                result = self._start(partial(function, *args))
                try:
                    await asyncio.wait({result}, timeout=TURN_S)
                except asyncio.CancelledError:
                    result.cancel()
                    raise
            return await result

    def _start(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Starts a thread; the caller has checked that one more is allowed."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def end(value: Any, error: Exception | None) -> None:
            self._running.discard(result)
            self._free.release()
            if result.cancelled():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def run() -> None:
            outcome = _outcome(function)
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, *outcome)

        try:
            # A daemon, which the end of the process does not wait for.
            threading.Thread(target=run, name="reader", daemon=True).start()
        except RuntimeError:
            self._free.release()
            raise
        self._running.add(result)
        return result


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
