"""Worker processes that apply a function to a stream of items, with results in input order.

Each worker has a pipe and a thread of the parent that serves it, so neither side can block the
other indefinitely. A worker exits when its pipe closes: none outlives the parent, however it dies.
"""

from __future__ import annotations

import functools
import multiprocessing
import pickle
import queue
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from megatron_ds.config.problems import user_error
from megatron_ds.fileio.interruptible_threads import InterruptibleThreads, Pending, defer_interrupts

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_IN_FLIGHT_PER_WORKER = 3
"""Items in memory per worker: in progress, queued, or done and waiting for their turn."""


class Workers(Generic[Item, Result]):
    """A context manager of worker processes.

    Enter it before starting threads and opening files, which forked workers would inherit.

    Args:
        function: Applied to each item in a worker.
        count: Number of workers.
    """

    def __init__(self, function: Callable[[Item], Result], count: int) -> None:
        self._function = function
        self._count = count
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._threads = InterruptibleThreads(count)
        self._in_flight: deque[Pending[Result]] = deque()

    def __enter__(self) -> Workers[Item, Result]:
        # Forked processes share the function's tables; otherwise they are pickled.
        fork = "fork" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            arguments = (self._function, theirs, ours)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with defer_interrupts():  # Python loses an interrupt that arrives during a fork
                process.start()
            # Closed before the next fork: otherwise the next worker keeps this pipe open, and the
            # death of this worker is not seen as the end of its pipe.
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._idle.put(ours)
        self._threads.__enter__()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if error_type is not None:
            for process in self._processes:
                process.terminate()
        self._in_flight.clear()
        self._threads.__exit__(error_type, *error)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """Results in order, with a bounded number of items in flight.

        Raises:
            UserError: If a worker is killed or runs out of memory.
            Exception: The exception of the function in a worker.
        """
        for item in items:
            self._in_flight.append(self._threads.submit(functools.partial(self._ask, item)))
            if len(self._in_flight) >= self._count * MAX_IN_FLIGHT_PER_WORKER:
                yield self._in_flight.popleft().result()
        yield from self.finish_pending()

    def finish_pending(self) -> Iterator[Result]:
        """Results of the items in flight, without taking further items."""
        while self._in_flight:
            yield self._in_flight.popleft().result()

    def _ask(self, item: Item) -> Result:
        connection = self._idle.get()
        try:
            _send(connection, item)
            answer: Result | Exception = connection.recv()
        except (EOFError, OSError):
            reason = "was killed, possibly for lack of memory"
            raise user_error("worker-process-lost", reason=reason) from None
        finally:
            self._idle.put(connection)
        if isinstance(answer, MemoryError):
            raise user_error("worker-process-lost", reason="ran out of memory")
        if isinstance(answer, Exception):
            raise answer
        return answer


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
