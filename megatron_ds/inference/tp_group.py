"""The ranks that share a model: the first hands out work, the others wait for it.

Waiting costs nothing and has no end: it is a group of its own, over gloo whatever the device,
whose receives sleep. Knows nothing of what the work is.
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

ENDLESS = timedelta(days=365)
TICK = 0.5
"""Seconds between two looks at the launcher."""
Job = TypeVar("Job")
Result = TypeVar("Result")
GoOn = Callable[[], bool]


class TpGroupBroken(Exception):
    """The ranks are no longer in step: one is gone, or failed where others did not."""


class TpWorkerGroup(Generic[Job, Result]):
    """One work done by all ranks of the process group alike.

    perform: the work, collective; it asks its second argument now and then whether to go on, on all
    ranks equally often, and gets the same answer on all.
    """

    def __init__(self, perform: Callable[[Job, GoOn], Result]) -> None:
        """Collective."""
        self._perform = perform
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=ENDLESS)

    def run_as_leader(self, job: Job, cancelled: threading.Event) -> Result:
        """The first rank's result. Raises what perform raised on all ranks; CrewBroken otherwise.

        cancelled: while it is set, perform is told not to go on.
        """
        self._broadcast([job])
        error: Exception | None = None
        result: list[Result] = []
        try:
            result.append(self._perform(job, lambda: self._broadcast_flag(not cancelled.is_set())))
        except Exception as caught:
            error = caught
        self._check_in_step(error)
        if error is not None:
            raise error
        return result[0]

    def run_as_follower(self) -> None:
        """Works with the first rank until it dismisses; on the others. Raises CrewBroken."""
        # The first rank hears an interrupt of the terminal too, and ends this one in order.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Python's own handlers do not run within a receive.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while (told := self._broadcast(None)) is not None:
            error: Exception | None = None
            try:
                self._perform(told[0], lambda: self._broadcast_flag(None))
            except Exception as caught:
                error = caught
            self._check_in_step(error)

    def shutdown_followers(self) -> None:
        """Ends the others' waiting; also of those that a launcher has ended already."""
        with suppress(TpGroupBroken):
            self._broadcast(None)

    def _broadcast(self, message: list[Job] | None) -> list[Job] | None:
        """The first rank's message, on every rank."""
        if self._group is None:
            return message
        box = [message]
        with _wrap_lost_rank():
            dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def _broadcast_flag(self, go_on: bool | None) -> bool:
        """The first rank's word, on every rank."""
        if self._group is None:
            return bool(go_on)
        word = torch.tensor([bool(go_on)])
        with _wrap_lost_rank():
            dist.broadcast(word, src=0, group=self._group)
        return bool(word.item())

    def _check_in_step(self, error: Exception | None) -> None:
        """Raises CrewBroken unless the ranks ended a work alike."""
        if isinstance(error, TpGroupBroken):
            raise error
        if self._group is None:
            return
        ends: list[Any] = [None] * dist.get_world_size()
        with _wrap_lost_rank():
            dist.all_gather_object(ends, None if error is None else repr(error), group=self._group)
        kinds = {None if end is None else end.partition("(")[0] for end in ends}
        if len(kinds) > 1:
            words = [f"rank {rank}: {end or 'no error'}" for rank, end in enumerate(ends)]
            raise TpGroupBroken("; ".join(words)) from error


def end_with_launchers() -> None:
    """From here on this process gets a SIGTERM when a launcher that started it is gone: DeepSpeed's
    leaves its ranks alone."""
    processes = find_launchers()

    def watch() -> None:
        while all(process.is_alive() for process in processes):
            time.sleep(TICK)
        os.kill(os.getpid(), signal.SIGTERM)

    if processes:
        threading.Thread(target=watch, name="launchers", daemon=True).start()


@contextmanager
def _wrap_lost_rank() -> Iterator[None]:
    """torch reports a lost process as a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        raise TpGroupBroken("a process that shares the model is gone") from error
