"""The log file of a rank (--log-dir): what the rank prints, and what only another rank prints."""

from __future__ import annotations

import faulthandler
import os
import shlex
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from megatron_ds.launch import environment


class _Copying:
    """A stream whose text is also written to a log; everything else is the stream's own."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream = stream
        self.log = log

    def write(self, text: str) -> int:
        # A full disk, or a terminal that was closed, must not cost the other copy.
        _append(self.log, text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def open_log(folder: str | None) -> None:
    """Copies stdout and stderr of this process, from now on, to `rankN.log` in a folder.

    Does nothing without a folder. Appends to an existing file. Python's stacks at a fatal signal
    are written there, too. Not copied is what libraries write past Python.

    Raises:
        OSError: If the file cannot be written.
    """
    if folder is None:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder, f"rank{environment.rank()}.log")
    log = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until the process ends
    writer = f"rank {environment.rank()} of {environment.world_size()} on {socket.gethostname()}"
    command = shlex.join(sys.argv)
    _append(log, f"=== {time.strftime('%Y-%m-%dT%H:%M:%S')} {writer}, ")
    _append(log, f"process {os.getpid()}: {command}\n")
    faulthandler.enable(log)
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:  # it is None if it was closed from the start
            setattr(sys, name, _Copying(stream, log))


def note(text: str) -> None:
    """Writes to the log of this rank alone what another rank prints."""
    if isinstance(sys.stderr, _Copying):
        _append(sys.stderr.log, f"{text}\n")


def _append(log: TextIO, text: str) -> None:
    with suppress(OSError, ValueError):
        log.write(text)
