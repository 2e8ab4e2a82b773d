"""Worker processes that apply a function to a stream of items, with results in input order.

Each worker has a pipe and a thread of the parent that serves it, so neither side can block the
other indefinitely. A worker exits when its pipe closes: none outlives the parent, however it dies.
"""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from megatron_ds.config.problems import user_error

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_IN_FLIGHT_PER_WORKER = 3
"""Items in memory per worker: in progress, queued, or done and waiting for their turn."""


class Workers(Generic[Item, Result]):
    """A context manager of worker processes.

    Enter it before starting threads and opening files, which forked workers would inherit.

    The caller's thread waits only in `queue.SimpleQueue`, whose locks are released in C. Ctrl-C at
    an arbitrary moment can leave the locks of `concurrent.futures` and `threading.Condition`
    acquired, because these are acquired in Python, and other threads then wait indefinitely.

    Args:
        function: Applied to each item in a worker.
        count: Number of workers.
    """

    def __init__(self, function: Callable[[Item], Result], count: int) -> None:
        self._function = function
        self._count = count
        self._submitted: queue.SimpleQueue[_Task[Item, Result] | None] = queue.SimpleQueue()
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._threads: list[threading.Thread] = []
        self._in_flight: deque[_Task[Item, Result]] = deque()

    def __enter__(self) -> Workers[Item, Result]:
        # Forked processes share the function's tables; otherwise they are pickled.
        fork = "fork" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            arguments = (self._function, theirs, ours)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with _defer_interrupts():
                process.start()
            # Closed before the next fork: otherwise the next worker keeps this pipe open, and the
            # death of this worker is not seen as the end of its pipe.
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        with _defer_interrupts():
            for connection in self._connections:
                thread = threading.Thread(target=self._serve_tasks, args=(connection,), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            for process in self._processes:
                process.terminate()
        self._in_flight.clear()
        with suppress(queue.Empty):
            while True:
                self._submitted.get_nowait()
        for _ in self._threads:
            self._submitted.put(None)
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """Results in order, with a bounded number of items in flight.

        Raises:
            UserError: If a worker is killed or runs out of memory.
            Exception: What the function raised in a worker.
        """
        for item in items:
            task = _Task[Item, Result](item)
            self._in_flight.append(task)
            self._submitted.put(task)
            if len(self._in_flight) >= self._count * MAX_IN_FLIGHT_PER_WORKER:
                yield self._in_flight.popleft().result()
        yield from self.finish_pending()

    def finish_pending(self) -> Iterator[Result]:
        """Results of the items in flight, without taking further items."""
        while self._in_flight:
            yield self._in_flight.popleft().result()

    def _serve_tasks(self, connection: Connection) -> None:
        while (task := self._submitted.get()) is not None:
            task.answer.put(_ask(connection, task.item))


class _Task(Generic[Item, Result]):
    """An item, and its result or what was raised instead, once that is known."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.answer: queue.SimpleQueue[Result | Exception] = queue.SimpleQueue()

    def result(self) -> Result:
        answer = self.answer.get()
        if isinstance(answer, MemoryError):
            raise user_error("worker-process-lost", reason="ran out of memory")
        if isinstance(answer, Exception):
            raise answer
        return answer


def _ask(connection: Connection, item: object) -> Any:
    """The answer of a worker, which may be an exception."""
    try:
        _send(connection, item)
        return connection.recv()
    except (EOFError, OSError):
        return user_error("worker-process-lost", reason="was killed, possibly for lack of memory")
    except Exception as error:  # an item that cannot be pickled, or an answer that cannot be read
        return error


@contextmanager
def _defer_interrupts() -> Iterator[None]:
    """Defers Ctrl-C: Python loses an interrupt that arrives during a fork.

    A signal mask would not do: it is per thread, and another thread would take the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if received:
        signal.raise_signal(signal.SIGINT)


def _send(connection: Connection, value: object) -> None:
    # Connection.send pickles to a view of a BytesIO. If the pipe breaks, the traceback keeps the
    # view, and Python before 3.12.2 crashes when it collects such a view as part of a cycle.
    connection.send_bytes(pickle.dumps(value))


def _serve(function: Callable[[Any], Any], connection: Connection, parents_end: Connection) -> None:
    # As long as this process holds the parent's end, the pipe is not closed by the parent's exit.
    parents_end.close()
    # Ctrl-C reaches the entire process group; the parent terminates the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            try:
                answer = function(item)
            except Exception as error:
                answer = error
            _send(connection, answer)
