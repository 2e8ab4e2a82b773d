"""Printing on one rank or on all, and reporting users' errors without a traceback."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from megatron_ds.config.problems import Problem, UserError, without_passwords
from megatron_ds.launch.environment import host_suffix, local_rank, rank, world_size
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process import program_start
from megatron_ds.programs import shown_name

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
SILENT_WAIT_S = 5.0
"""Delay before a wait for another process is reported."""
_recorder: ContextVar[Callable[[str], object]] = ContextVar("recorder", default=str)


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Around the output of a tool that has done its work: its reader may quit early, as `head`
    does."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        redirect_to_null(sys.stdout)


def redirect_to_null(stream: TextIO) -> None:
    """Discards all further output to a stream, including what is buffered."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def plain_warnings(render: Callable[[Problem | str], str] = str) -> Iterator[None]:
    """Prints each Python warning once, as one line on stderr without its source line.

    Args:
        render: Gives the text of a message, which may be a `Problem`.
    """
    shown: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        values = message.args if isinstance(message, Warning) else ()
        text = values[0] if values and isinstance(values[0], Problem) else str(message)
        if str(text) not in shown:
            shown.add(str(text))
            print(f"WARNING: {render(text)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def print_on_rank(text: str, *, rank_to_print: int = 0) -> None:
    """Prints on one rank and flushes.

    Args:
        text: One or more lines.
        rank_to_print: Global rank; negative numbers count from the last one.
    """
    if rank() == rank_to_print % world_size():
        _print(text, sys.stdout)
        _recorder.get()(without_passwords(text))


@contextmanager
def recording(record: Callable[[str], object]) -> Iterator[None]:
    """Calls a function with what `print_on_rank` prints inside, on the rank that prints it."""
    token = _recorder.set(record)
    try:
        yield
    finally:
        _recorder.reset(token)


def warn_on_rank(problem: Problem) -> None:
    """Prints a warning on the first rank."""
    print_on_rank(f"WARNING: {problem.render()}")


def print_error(text: Problem | str) -> None:
    """Prints to stderr on this rank."""
    _print(str(text), sys.stderr)


@contextmanager
def calling_after(seconds: float, function: Callable[..., object], *args: Any) -> Iterator[None]:
    """Calls a function in another thread, unless the body takes fewer seconds."""
    timer = threading.Timer(seconds, function, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def waiting_for(what: str, patience: float = 1.0) -> AbstractContextManager[None]:
    """Prints on this rank what the body waits for, after `patience` times SILENT_WAIT_S."""
    text = with_rank_prefix(f"waiting for {what}")
    return calling_after(patience * SILENT_WAIT_S, print_error, text)


def with_rank_prefix(text: str) -> str:
    """Prepends the program and, if there are several ranks or hosts, rank and host to a message."""
    prefix = "" if world_size() == 1 else f"rank {rank()}{host_suffix()}: "
    return f"{shown_name(Path(sys.argv[0]).name)}: {prefix}{text}"


def _print(text: str, stream: TextIO) -> None:
    text = without_passwords(text)
    try:
        # One write: an unbuffered print() writes the line's end separately, and lines of two ranks
        # would be interleaved.
        print(f"{text}\n", end="", file=stream, flush=True)
    except OSError as error:
        # A lost log line must not stop a run, which still has to save.
        if error.errno in DISK_FULL_ERRORS:
            return  # the next line may succeed
        # The reader is gone: Ctrl-C also ends the `tee` of a pipe, and terminals get closed.
        redirect_to_null(stream)


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table of text."""
    listed = list(rows)
    widths = [max(map(len, column)) for column in itertools.zip_longest(*listed, fillvalue="")]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in listed]


def write_torchelastic_error_file(text: str) -> None:
    """Passes the message on to torchrun's summary; other launchers have no such file."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def error_message(error: BaseException) -> str:
    """The message of an error; for a `UserError` with the codes of its problems."""
    if isinstance(error, UserError):
        return "\n".join(problem.render() for problem in error.problems)
    return str(error)


def is_user_error(error: BaseException) -> bool:
    """Whether the user can fix an error.

    True for a `UserError`, and for an OSError that was raised in this package or by a call of this
    package into Python's standard library that names a file.
    """
    if isinstance(error, UserError):
        return True
    if not isinstance(error, OSError) or error.__traceback__ is None:
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if error.filename is not None:
        while files and _is_stdlib_file(files[-1]):
            files.pop()
    return bool(files) and Path(__file__).parents[1] in Path(files[-1]).parents


def _is_stdlib_file(filename: str) -> bool:
    """Whether code belongs to the standard library: `<frozen os>`, `lib/python3.12/*`."""
    library = Path(sysconfig.get_path("stdlib"))
    installed = "site-packages" in filename
    return filename.startswith("<frozen ") or (library in Path(filename).parents and not installed)


@contextmanager
def exit_without_traceback() -> Iterator[None]:
    """Ends the program with a message for a user's error (see `is_user_error`) and an interrupt.

    The status is 1 for a user's error and 130 for an interrupt; if the reader of the output has
    exited, as `head` does, it is 141. Other errors keep their traceback. If several ranks have the
    same error, one of them prints it.
    """
    program_start.finish()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        redirect_to_null(sys.stdout)
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt as error:
        if local_rank() == 0:
            print_error("; ".join(["interrupted", *getattr(error, "__notes__", ())]))
        raise SystemExit(int(ExitCode.INTERRUPTED)) from None
    except (UserError, OSError) as error:
        if not is_user_error(error):
            raise
        if _is_first_to_report():
            notes = getattr(error, "__notes__", ())
            print_error("\n".join([with_rank_prefix(error_message(error)), *notes]))
        raise SystemExit(1) from None


def _is_first_to_report() -> bool:
    """Whether no other rank has reported an error yet: most often all of them have the same one.

    Uses the store of the process group. Before it exists, the first process of each host reports.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return local_rank() == 0
    try:
        reports = dist.distributed_c10d._get_default_store().add("reported errors", 1)
    except RuntimeError:  # the rank that held the store is gone: report twice rather than never
        return True
    return bool(reports == 1)
