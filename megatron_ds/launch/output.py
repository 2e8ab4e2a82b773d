"""What is printed by one rank or by all, and errors that are shown to users without a traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    pass
from megatron_ds.launch.environment import local_rank, rank, world_size

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write to a full disk is answered with."""


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Around what a tool prints when its work is done: who reads it may have seen enough, as `head`
    has, and the rest goes nowhere."""
    with suppress(BrokenPipeError):
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            redirect_stdout_to_null()
            raise


def redirect_stdout_to_null() -> None:
    """What is still printed goes nowhere, and so does what waits to be flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings go to stderr as lines for users, each once and without the code that warned."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            print(f"WARNING: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def print_on_rank(text: str, *, on: int = 0) -> None:
    """Prints on one rank, at once."""
    if rank() == on % world_size():
        _print(text, sys.stdout)


def print_error(text: str) -> None:
    """Prints to the standard error, on this rank."""
    _print(text, sys.stderr)


def with_rank_prefix(text: str) -> str:
    """A message with the program and, where there are several, the rank that it comes from."""
    who = "" if world_size() == 1 else f"rank {rank()}: "
    return f"{Path(sys.argv[0]).name}: {who}{text}"


def _print(text: str, stream: TextIO) -> None:
    try:
        # In one write: without buffers print() would give the line's end apart, and the lines of
        # two ranks would run into each other.
        print(f"{text}\n", end="", file=stream, flush=True)
    except OSError as error:
        # The run is to save all the same, and a rank that ends is not to stop at its last words.
        if error.errno in FULL:
            return  # there may be room for the next line
        # Whoever read it is gone: Ctrl-C ends the `tee` of a pipe as well, and a terminal is
        # closed. Nobody reads what the run says to that.
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, stream.fileno())
        os.close(silent)


def write_torchelastic_error_file(text: str) -> None:
    """Gives torchrun the words for its summary; other launchers have none."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def is_user_error(error: BaseException) -> bool:
    """Whether an error is the user's to mend: one of the values that this package checks, or of
    the files that it asks Python's own library for."""
    if not isinstance(error, ValueError | OSError) or error.__traceback__ is None:
        return False
    places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, OSError) and error.filename is not None:
        while places and _is_stdlib_file(places[-1]):
            places.pop()
    return bool(places) and Path(__file__).parents[1] in Path(places[-1]).parents


def _is_stdlib_file(filename: str) -> bool:
    """Whether a file of code belongs to Python's library: <frozen os> and lib/python3.12/*."""
    library = Path(sysconfig.get_path("stdlib"))
    installed = "site-packages" in filename
    return filename.startswith("<frozen ") or (library in Path(filename).parents and not installed)


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Ends the program with status 1 and one message for an error that is the user's to mend.

    That is a ValueError or an OSError raised in this package; any other keeps its traceback. Of the
    ranks that meet it, the first one speaks.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if not is_user_error(error):
            raise
        if _speaks_first():
            print_error(with_rank_prefix(str(error)))
        raise SystemExit(1) from None


def screen() -> tuple[int, bool]:
    """Columns of the standard output, and whether it is a terminal."""
    if not sys.stdout.isatty():
        return 100, False
    return shutil.get_terminal_size().columns, True


def _speaks_first() -> bool:
    """Whether no other rank has reported an error yet: most often they all have the same one.

    Asks the store through which the ranks found each other. Before there is one, the first process
    of each machine speaks.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return local_rank() == 0
    try:
        reports = dist.distributed_c10d._get_default_store().add("reported errors", 1)
    except RuntimeError:  # the rank that held the store is gone: better twice than never
        return True
    return bool(reports == 1)
