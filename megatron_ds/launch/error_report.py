"""What is said of the error that ends a run: whose it is, in whose words, and what to try.

Knows torch's errors by their looks and imports it only if it is there already.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.launch import environment, output
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.liveness import OUT_OF_HOST_MEMORY

OUT_OF_DEVICE_MEMORY = (
    "the device's memory is full. What takes less of it: a smaller --micro-batch-size (the global "
    "batch stays, in more steps), --recompute-granularity full (or --checkpoint-activations), a "
    "higher --zero-stage, --cpu-optimizer, a larger --tensor-model-parallel-size"
)
HANGS = (
    "another rank did not come to a collective within --distributed-timeout-minutes: it hangs, or "
    "needs longer than that. Where a rank is stands in: py-spy dump --pid PROCESS"
)
COLLECTIVES = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
"""What messages of torch's communication libraries hold."""
LOADER_DIED = ("dataloader worker (pid",)
TIMEOUTS = ("timed out", "timeout")


@dataclass(frozen=True)
class ErrorReport:
    """What is to be said of an error."""

    words: str
    """What the rank did, for the others: "failed: ...\"."""
    code: ExitCode
    text: str = ""
    """For the user, if it is not the words."""
    trace: str = ""
    is_of_all: bool = False
    """Before the ranks know each other: most often all of them have it, so one tells it."""

    def full_text(self) -> str:
        """Traceback and words, as they are printed."""
        if self.trace and not self.text and environment.world_size() == 1:
            return self.trace.rstrip()
        return self.trace + output.with_rank_prefix(self.text or self.words)


def make_report(error: BaseException) -> ErrorReport:
    words = f"failed: {_summary(error)}"
    if isinstance(error, RunAborted):
        return ErrorReport(f"ended: {error}", error.code, str(error), is_of_all=True)
    if output.is_user_error(error):
        return ErrorReport(words, ExitCode.ERROR, str(error), is_of_all=True)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return ErrorReport(f"ended with status {error.code}", ExitCode.ERROR)
    if isinstance(error, SystemExit):
        return ErrorReport(f"ended: {error}", ExitCode.ERROR, str(error), is_of_all=True)
    if is_collective_error(error) and _mentions(error, TIMEOUTS):
        return ErrorReport(f"failed: {HANGS}", ExitCode.ERROR, f"{HANGS}\n{_place(error)}")
    advice = _advice(error)
    if _mentions(error, LOADER_DIED):  # where the reader waited for it says nothing
        return ErrorReport(words, ExitCode.ERROR, f"{words}\n{advice}")
    text = f"{words}\n{advice}" if advice else ""
    return ErrorReport(words, ExitCode.ERROR, text, "".join(traceback.format_exception(error)))


def is_collective_error(error: BaseException) -> bool:
    """Whether it says no more than that another rank did not answer."""
    links = [link for link in _chain(error) if isinstance(link, RuntimeError)]
    torch = sys.modules.get("torch.distributed")
    return any(
        (torch is not None and isinstance(link, torch.DistError)) or _mentions(link, COLLECTIVES)
        for link in links
    )


def _advice(error: BaseException) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_DEVICE_MEMORY
    if isinstance(error, MemoryError) or _mentions(error, ("can't allocate memory",)):
        return OUT_OF_HOST_MEMORY
    if _mentions(error, LOADER_DIED):
        return f"A data loader process died. {OUT_OF_HOST_MEMORY}"
    return ""


def _summary(error: BaseException) -> str:
    """The error's last line in a traceback, without what follows its first line."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """Where in this package it happened."""
    package = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if package in Path(frame.filename).parents:
            return f"It waited in {frame.name}, {frame.filename} line {frame.lineno}"
    return f"It waited in {_summary(error)}"


def _mentions(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
