"""A thread for calls that take long. Must not know what they do."""

from __future__ import annotations

import asyncio
import ctypes
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class WorkerThread:
    """Runs the calls of an event loop one after another."""

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        self._start()

    async def call(self, timeout: float, function: Callable[..., Result], *args: object) -> Result:
        """The function's result.

        A call that does not end in time is interrupted at its next Python instruction. Code of
        libraries may have none for long, so that another thread runs the next calls at once.

        Raises:
            TimeoutError: If the call, with those before it, takes longer.
        """
        future: Future[Result] = Future()
        self._calls.put((future, partial(function, *args)))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.wrap_future(future)
        finally:
            if future.running():
                ident, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
                self._start()

    def _start(self) -> None:
        # A daemon, which the end of the process does not wait for.
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            future, function = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
