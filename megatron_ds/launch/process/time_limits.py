"""Waits and calls that end after a given time, in processes that are about to end."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from megatron_ds.launch.exit_codes import ExitCode

OUTPUT_S = 2.0
"""Longest wait for the reader of the output."""
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

    try:
        threading.Thread(target=run, daemon=True).start()
        return results.get(timeout=timeout_s)
    except (queue.Empty, RuntimeError):  # or no thread can be started
        return default


def say(print_text: Callable[[str], None], text: str) -> None:
    """Prints; continues if the reader of the output stalls, or another thread that prints waits for
    it."""
    thread = threading.Thread(target=print_text, args=(text,), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # none can be started
        print_text(text)
    else:
        thread.join(OUTPUT_S)


def end_process(code: ExitCode) -> NoReturn:
    """Ends this process and its children (the data loaders), from any thread."""
    for child in multiprocessing.active_children():
        child.kill()
    call_with_timeout(_flush, default=None, timeout_s=OUTPUT_S)
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it is None if the descriptor was closed from the start
            with suppress(OSError, ValueError):
                stream.flush()
