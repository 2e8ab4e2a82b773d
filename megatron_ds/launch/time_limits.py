"""Waits and calls that end after a given time, in processes that are about to end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Result = TypeVar("Result")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Waits until a condition holds or the time is over."""
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def call_with_timeout(
    function: Callable[[], Result], *, default: Result, timeout_s: float = 1.0
) -> Result:
    """Calls a function of the store, which may fail or never return."""
    results: queue.SimpleQueue[Result] = queue.SimpleQueue()

    def run() -> None:
        with suppress(RuntimeError, OSError):
            results.put(function())
            return
        results.put(default)

    threading.Thread(target=run, daemon=True).start()
    try:
        return results.get(timeout=timeout_s)
    except queue.Empty:
        return default
