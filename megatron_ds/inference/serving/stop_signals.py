"""SIGTERM and SIGINT in a process whose main thread may be computing. Must not know HTTP."""

from __future__ import annotations

import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ds.inference.serving.watchdog import NUMBERS

KILL_AFTER_S = 2.5
"""Seconds after the limit at which the process is killed; a process that ends itself writes its
output in this time."""


@contextmanager
def stopping(
    stop: Callable[[int], None], end: Callable[[], object], limit_s: float
) -> Iterator[None]:
    """Calls a function, inside the context, with the number of each SIGTERM and SIGINT.

    The process ends even if the main thread does not return. It is killed by another process if a
    call holds the interpreter's lock, without which no thread runs. Python's handlers would wait
    for the main thread. The kernel writes the number of a signal to a socket instead, which another
    thread reads.

    Args:
        stop: Called in another thread.
        end: Ends this process, from any thread.
        limit_s: Seconds after the first signal, until it is called.
    """
    receiving, sending = socket.socketpair()
    sending.setblocking(False)
    limit = threading.Timer(limit_s, end)
    limit.daemon = True
    watchdog = _start_watchdog(receiving, limit_s + KILL_AFTER_S)

    def watch() -> None:
        has_begun = False
        while True:
            # Not a receive that waits: it would take a number from the watchdog without the lock.
            select.select([receiving], [], [])
            if not (data := receiving.recv(1)):
                return
            if data[0] not in NUMBERS:
                continue
            if not has_begun:
                limit.start()
                with suppress(OSError):  # it is lost
                    assert watchdog.stdin is not None
                    watchdog.stdin.write(b"x")
            has_begun = True
            stop(data[0])

    previous_fd = signal.set_wakeup_fd(sending.fileno())
    previous = [signal.signal(signum, lambda *_: None) for signum in NUMBERS]
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for signum, handler in zip(NUMBERS, previous, strict=True):
            signal.signal(signum, handler)
        signal.set_wakeup_fd(previous_fd)
        sending.close()
        watcher.join()
        receiving.close()
        limit.cancel()
        with watchdog:  # closes its input, and waits for its end
            pass


def _start_watchdog(numbers: socket.socket, limit_s: float) -> subprocess.Popen[bytes]:
    program = str(Path(__file__).with_name("watchdog.py"))
    words = [sys.executable, "-I", "-S", program, str(numbers.fileno()), str(limit_s)]
    return subprocess.Popen(
        words,
        bufsize=0,
        stdin=subprocess.PIPE,
        pass_fds=[numbers.fileno()],
        start_new_session=True,  # signals to the group of this process are not for it
    )
