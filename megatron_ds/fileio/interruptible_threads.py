"""Threads for which the main thread can wait while Ctrl-C arrives.

The locks of `concurrent.futures` and `threading.Condition` are acquired in Python. An interrupt at
an arbitrary moment can leave one acquired, and other threads then wait for it indefinitely. Here
the caller's thread waits only in `queue.SimpleQueue`, whose locks are released in C.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Pending(Generic[Result]):
    """The result of a function that another thread calls."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._result: Result
        self._error: BaseException | None = None
        self._finished: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.is_done = False

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self.is_done = True
        self._finished.put(None)

    def result(self) -> Result:
        """Waits for the result, and raises what the function raised."""
        while not self.is_done:  # an interrupt may discard what `get` returns
            self._finished.get()
        if self._error is not None:
            raise self._error
        return self._result


class InterruptibleThreads:
    """A context manager of threads that call functions.

    Args:
        count: Number of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._submitted: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> InterruptibleThreads:
        with defer_interrupts():
            for _ in range(self._count):
                thread = threading.Thread(target=self._serve, daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *error: object) -> None:
        """Waits for running functions and cancels pending ones."""
        with suppress(queue.Empty):
            while True:
                self._submitted.get_nowait()
        for _ in self._threads:
            self._submitted.put(None)
        for thread in self._threads:
            thread.join()

    def submit(self, function: Callable[[], Result]) -> Pending[Result]:
        pending = Pending(function)
        self._submitted.put(pending)
        return pending

    def _serve(self) -> None:
        while (pending := self._submitted.get()) is not None:
            pending.run()


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block.

    A signal mask would not do: it is per thread, and another thread would take the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda signum, _: received.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        signal.raise_signal(signal.SIGINT)
