"""Processes that read for a training process, and end with it."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent exits."""


def die_with_parent() -> None:
    """Makes this process exit with its parent, neither before nor after it.

    Launchers and terminals send signals to every process of a run, but the trainer still needs its
    loader to finish the step and save. If the trainer is killed, the loader must exit at once
    (supported by Linux only): it holds the trainer's connections open, and the other ranks would
    keep waiting for them.
    """
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
