"""Worker processes that apply one function to a stream of items, results in the items' order.

Each worker has a pipe and a thread of the parent that serves it, so neither side can block the
other for ever. A worker ends when its pipe closes: nothing outlives the parent, however it ends.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_IN_FLIGHT_PER_WORKER = 3
"""Items in memory per worker: being worked on, waiting, or done and waiting for its turn."""
OOM_HINT = "try fewer --workers, a smaller --chunk-size or a smaller --max-document-bytes"


class Workers(Generic[Item, Result]):
    """A context manager; `map` gives the results in order, with a bounded number under way.

    Raises in the parent what the function raised in a worker, and ValueError if a worker was
    killed. Start it before threads and files: with fork, workers inherit what is open.
    """

    def __init__(self, function: Callable[[Item], Result], count: int) -> None:
        self._function = function
        self._count = count
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._under_way: deque[Future[Result]] = deque()

    def __enter__(self) -> Workers[Item, Result]:
        # A fork shares the function's tables and starts at once; elsewhere they are sent over.
        fork = "fork" in multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        for _ in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(self._function, theirs, ours), daemon=True
            )
            with _interrupts_later():
                process.start()
            # Closed before the next fork, so that this worker's death is seen as the pipe's end.
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._idle.put(ours)
        self._threads = ThreadPoolExecutor(self._count)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for process in self._processes:
                process.terminate()
        self._threads.shutdown(cancel_futures=True)
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join()

    def map(self, items: Iterable[Item]) -> Iterator[Result]:
        """The results, in order. Takes from `items` as workers get free."""
        for item in items:
            self._under_way.append(self._threads.submit(self._ask, item))
            if len(self._under_way) >= self._count * MAX_IN_FLIGHT_PER_WORKER:
                yield self._under_way.popleft().result()
        yield from self.finish_pending()

    def finish_pending(self) -> Iterator[Result]:
        """The results of what is under way, without taking further items."""
        while self._under_way:
            yield self._under_way.popleft().result()

    def _ask(self, item: Item) -> Result:
        connection = self._idle.get()
        try:
            connection.send(item)
            good, answer = connection.recv()
        except (EOFError, OSError):
            raise ValueError(f"a worker process was killed (out of memory?); {OOM_HINT}") from None
        finally:
            self._idle.put(connection)
        if isinstance(answer, MemoryError):
            raise ValueError(f"a worker process ran out of memory; {OOM_HINT}")
        if not good:
            raise answer
        return answer  # type: ignore[no-any-return]


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Holds Ctrl-C back: Python loses what comes in the middle of a fork, and would work on.

    By a handler, since a mask holds it back for this thread alone and another one would get it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


def _serve(
    function: Callable[[Item], Result], connection: Connection, parents_end: Connection
) -> None:
    # While this process holds the other end too, the pipe would never end.
    parents_end.close()
    # Ctrl-C reaches the whole group; the parent ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: tuple[bool, Result | Exception] = (True, function(item))
        except Exception as error:
            answer = (False, error)
        try:
            connection.send(answer)
        except OSError:
            return
