"""Leader/follower execution on the tensor-parallel ranks of a server.

Followers wait indefinitely and without load: their group uses gloo on any device, whose receives
sleep instead of polling. Must not know what the jobs are.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from megatron_ds.launch.liveness import find_launchers

NO_TIMEOUT = timedelta(days=365)
LAUNCHER_POLL_S = 0.5
Job = TypeVar("Job")
Result = TypeVar("Result")
ShouldContinue = Callable[[], bool]


class TpGroupBroken(Exception):
    """The ranks are out of step: one is lost, or failed where others did not."""


class TpWorkerGroup(Generic[Job, Result]):
    """Runs jobs on all ranks of the process group."""

    def __init__(self, run: Callable[[Job, ShouldContinue], Result]) -> None:
        """Collective.

        Args:
            run: Runs a job; collective. It calls its second argument equally often on all ranks,
                which get the same results.
        """
        self._run = run
        self._is_alone = dist.get_world_size() == 1
        self._group = None
        if not self._is_alone:
            self._group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)

    def run_as_leader(self, job: Job, cancelled: threading.Event) -> Result:
        """Runs a job on all ranks, on the first rank.

        Args:
            job: Is sent to the followers.
            cancelled: While set, `should_continue` of the job returns False.

        Raises:
            TpGroupBroken: If the ranks did not end the job alike.
            Exception: The job's own, if all ranks raised it.
        """
        if self._is_alone:
            return self._run(job, lambda: not cancelled.is_set())
        self._broadcast([job])
        return self._run_in_step(job, lambda: not cancelled.is_set())

    def run_as_follower(self) -> None:
        """Runs the leader's jobs, on the other ranks, until it shuts them down.

        Raises:
            TpGroupBroken: If the ranks did not end a job alike.
        """
        # A terminal sends its interrupt to the leader as well, which shuts this rank down.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python's own handlers do not run during a receive.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while (message := self._broadcast(None)) is not None:
            try:
                self._run_in_step(message[0], lambda: False)
            except TpGroupBroken:
                raise
            except Exception:  # all ranks raised it, and the leader reports it
                continue

    def shutdown_followers(self) -> None:
        """Ends the followers; ignores the ones that a launcher has already ended."""
        if not self._is_alone:
            with suppress(TpGroupBroken):
                self._broadcast(None)

    def _run_in_step(self, job: Job, flag: ShouldContinue) -> Result:
        """Runs a job, whose `should_continue` is the first rank's `flag`."""
        try:
            result = self._run(job, lambda: self._broadcast_flag(flag()))
        except Exception as error:
            self._check_in_step(error)
            raise
        self._check_in_step(None)
        return result

    def _broadcast(self, message: list[Job] | None) -> list[Job] | None:
        """The first rank's message, on every rank."""
        box = [message]
        with _wrap_lost_rank():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _broadcast_flag(self, flag: bool) -> bool:
        """The first rank's flag, on every rank."""
        tensor = torch.tensor([flag])
        with _wrap_lost_rank():
            dist.broadcast(tensor, src=0, group=self._group)
        return bool(tensor.item())

    def _check_in_step(self, error: Exception | None) -> None:
        """
        Raises:
            TpGroupBroken: Unless all ranks ended the job without or with the same kind of error.
        """
        if isinstance(error, TpGroupBroken):
            raise error
        errors: list[Any] = [None] * dist.get_world_size()
        with _wrap_lost_rank():
            own = None if error is None else repr(error)
            dist.all_gather_object(errors, own, group=self._group)
        # The messages may differ, for instance in the rank that they name.
        kinds = {None if text is None else text.partition("(")[0] for text in errors}
        if len(kinds) > 1:
            lines = [f"rank {rank}: {text or 'no error'}" for rank, text in enumerate(errors)]
            raise TpGroupBroken("; ".join(lines)) from error


def end_with_launchers() -> None:
    """Sends this process a SIGTERM once a launcher that started it is gone.

    DeepSpeed's launcher does not end its ranks when it is killed.
    """
    processes = find_launchers()

    def watch() -> None:
        while all(process.is_alive() for process in processes):
            time.sleep(LAUNCHER_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)

    if processes:
        threading.Thread(target=watch, name="launchers", daemon=True).start()


@contextmanager
def _wrap_lost_rank() -> Iterator[None]:
    """Converts the RuntimeError by which torch reports a lost process."""
    try:
        yield
    except RuntimeError as error:
        raise TpGroupBroken("a rank of the model is lost") from error
