"""A program that kills the process that started it, if that does not end in time after a signal.

It runs in a process of its own, because a call that holds the interpreter's lock stops every thread
of a process. Runs alone, and imports nothing of the package.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

NUMBERS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.05
"""While the number of another signal waits to be read."""
COMMANDS = 0
"""Descriptor of the standard input: a byte means that a signal has arrived, its end that the other
process has ended, or needs no watch any more."""


def wait_for_signal(numbers: socket.socket) -> bool:
    """Waits until a signal arrives; False if there will be none.

    Args:
        numbers: Where the other process reads the numbers of its signals, once it can. They are
            left there.
    """
    watched: list[Any] = [numbers, COMMANDS]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if COMMANDS in ready:
            return bool(os.read(COMMANDS, 1))
        with suppress(BlockingIOError):  # the other process has read it in between
            if {*numbers.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)} & {*NUMBERS}:
                return True
        time.sleep(POLL_S)


def main(descriptor: int, limit: float) -> None:
    """Kills the parent process if it has not ended `limit` seconds after a signal."""
    parent = os.getppid()
    if not wait_for_signal(socket.socket(fileno=descriptor)):
        return
    end = time.monotonic() + limit
    while (left := end - time.monotonic()) > 0:
        if select.select([COMMANDS], [], [], left)[0] and not os.read(COMMANDS, 64):
            return
    if os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
