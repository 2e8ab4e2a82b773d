"""Turns the exception that ends a run into a message: whose error it is, and what to try.

Recognizes torch's errors by their texts, and does not import torch.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.launch import environment, output
from megatron_ds.launch.exit_codes import ExitCode, RunAborted, SettingsRejected
from megatron_ds.launch.process.stop_request import StopReason

COLLECTIVE_ERROR_TEXTS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
"""Parts of the messages of torch's communication libraries."""
RENDEZVOUS_ERROR_TEXTS = ("waiting for clients", "the client socket has", "the server socket has")
"""Parts of the messages of torch's store, at which the processes meet."""
LOADER_ERROR_TEXTS = ("data loader process (pid",)


@dataclass(frozen=True)
class ErrorReport:
    """The report of an error.

    Attributes:
        summary: Summary of the failure for the other ranks: `failed: ...`.
        code: Exit status.
        text: Message for the user; the summary if empty.
        traceback: Formatted traceback, empty for users' errors.
        is_common: Whether most likely every rank has this error. Before the ranks know each other,
            only one of them then reports it.
        problems: Report to the other hosts before the start, if that is not the message.
    """

    summary: str
    code: ExitCode
    text: str = ""
    traceback: str = ""
    is_common: bool = False
    problems: Sequence[str] = ()

    def full_text(self) -> str:
        """Traceback and message, as printed."""
        if self.traceback and not self.text and environment.world_size() == 1:
            return self.traceback.rstrip()
        return self.traceback + output.with_rank_prefix(self.text or self.summary)


def make_report(error: BaseException) -> ErrorReport:
    """The report of any exception that ends a rank."""
    summary = f"failed: {_first_line(error)}"
    message = output.error_message(error)
    if isinstance(error, RunAborted):
        problems = error.problems if isinstance(error, SettingsRejected) else ()
        return ErrorReport(
            f"ended: {error}", error.code, str(error), is_common=True, problems=problems
        )
    if output.is_user_error(error):
        listed = error.problems if isinstance(error, UserError) else ()
        problems = [problem.render() for problem in listed]
        return ErrorReport(summary, ExitCode.ERROR, message, is_common=True, problems=problems)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return ErrorReport(f"ended with status {error.code}", ExitCode.ERROR)
    if isinstance(error, SystemExit):
        return ErrorReport(f"ended: {error}", ExitCode.ERROR, message, is_common=True)
    if is_collective_error(error) and _mentions(error, RENDEZVOUS_ERROR_TEXTS):
        return rendezvous_report(str(error).splitlines()[0].rstrip("."))
    if is_collective_error(error) and _mentions(error, ("timed out", "timeout")):
        problem = Problem("collective-timed-out")
        text = f"{problem.render()}\n{_waiting_location(error)}"
        return ErrorReport(f"failed: {problem}", ExitCode.ERROR, text)
    hint = _hint(error)
    text = "" if hint is None else f"{summary}\n{hint.render()}"
    if _mentions(error, LOADER_ERROR_TEXTS):  # where the reader waited for it is of no interest
        return ErrorReport(summary, ExitCode.ERROR, text)
    return ErrorReport(summary, ExitCode.ERROR, text, "".join(traceback.format_exception(error)))


def is_collective_error(error: BaseException) -> bool:
    """Whether an error only reports that another rank did not answer."""
    torch = sys.modules.get("torch.distributed")
    return any(
        (torch is not None and isinstance(link, torch.DistError))
        or _mentions(link, COLLECTIVE_ERROR_TEXTS)
        for link in _error_chain(error)
        if isinstance(link, RuntimeError)
    )


def rendezvous_report(error: str) -> ErrorReport:
    """The report of processes that do not meet."""
    size = environment.world_size()
    address = environment.rendezvous()
    problem = Problem("rendezvous-failed", size=size, address=address, error=error)
    return ErrorReport(f"failed: {problem}", ExitCode.ERROR, problem.render())


def startup_report(reason: StopReason) -> ErrorReport:
    """The report of a process that a signal ends before it trains."""
    summary = f"was stopped by {reason.signal} before training started"
    text = Problem("stopped-before-training", summary=summary).render()
    return ErrorReport(summary, reason.exit_code, text, is_common=True)


def suspension_report(seconds: float) -> ErrorReport:
    """The report of a process that did not run for so long that its peers continued without it."""
    problem = Problem("was-suspended", seconds=seconds)
    return ErrorReport(f"failed: {problem}", ExitCode.PEER_LOST, problem.render())


def _hint(error: BaseException) -> Problem | None:
    """Advice on an error."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return Problem("out-of-device-memory")
    if isinstance(error, MemoryError) or _mentions(error, ("can't allocate memory",)):
        return Problem("out-of-host-memory")
    if _mentions(error, ("duplicate gpu detected",)):
        return Problem("device-of-several-processes")
    if _mentions(error, LOADER_ERROR_TEXTS):
        if _mentions(error, (f"by signal {int(signal.SIGBUS)}",)):
            return Problem("token-file-changed")
        return Problem("loader-process-lost", hint=Problem("out-of-host-memory"))
    return None


def _first_line(error: BaseException) -> str:
    """Type and first line of the message, as at the end of a traceback."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _waiting_location(error: BaseException) -> str:
    """The innermost frame of this package."""
    package = Path(__file__).parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if package in Path(frame.filename).parents:
            return f"It waited in {frame.name}, {frame.filename} line {frame.lineno}"
    return f"It waited in {_first_line(error)}"


def _mentions(error: BaseException, texts: tuple[str, ...]) -> bool:
    message = str(error).lower()
    return any(text in message for text in texts)


def _error_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
