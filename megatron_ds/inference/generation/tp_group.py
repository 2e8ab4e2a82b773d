"""Keeps the tensor-parallel ranks of a server in step: the first one decides, all compute.

Followers wait indefinitely and without load: their group uses gloo on any device, whose receives
sleep instead of polling. Must not know what the commands are.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions  # type: ignore[attr-defined]

from megatron_ds.launch.watch.liveness import find_launchers

NO_TIMEOUT = timedelta(days=365)
STEP_TIMEOUT = timedelta(seconds=60)
"""Timeout of the exchange, except where a follower waits for work. It ends a rank that failed
alone: its peer ranks may be waiting for it in a collective of the model until it exits."""
LAUNCHER_POLL_S = 0.5
Command = TypeVar("Command")


class TpGroupBroken(Exception):
    """The ranks are out of step: one is lost, or failed where others did not."""


class TpLink(Generic[Command]):
    """Passes the first rank's commands to all ranks of the process group."""

    def __init__(self) -> None:
        """Collective."""
        self._group = None
        self.is_leader = dist.get_rank() == 0
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)

    def exchange(
        self, commands: Sequence[Command], error: Exception | None = None
    ) -> Sequence[Command]:
        """The first rank's commands, on every rank. Collective.

        Args:
            commands: Ignored on the other ranks.
            error: Why this rank's last step failed.

        Raises:
            TpGroupBroken: If a rank is lost, or the step did not fail on all ranks alike.
        """
        if self._group is None:
            return commands
        # The messages of errors may differ, for instance in the rank that they name.
        code = _hash_of(type(error).__name__) if error is not None else 0
        try:
            sent = torch.tensor([len(commands) if self.is_leader else 0, code, -code])
            options: Any = AllreduceOptions()
            options.reduceOp = dist.ReduceOp.MAX
            # Of the operation, not of the wait for it: the process cannot exit while one runs.
            waits_for_work = error is None and not self.is_leader
            options.timeout = NO_TIMEOUT if waits_for_work else STEP_TIMEOUT
            self._group.allreduce([sent], options).wait()
            count, highest, lowest = sent.tolist()
            if highest != -lowest:
                shown = "no error" if error is None else repr(error)
                raise TpGroupBroken(f"rank {dist.get_rank()}: {shown}; others differ") from error
            box = [list(commands)]
            if count:
                dist.broadcast_object_list(box, src=0, group=self._group)
            return box[0] if count else ()
        except RuntimeError as lost:  # torch's way to report a lost process
            raise TpGroupBroken("a rank of the model is lost") from lost


def _hash_of(text: str) -> int:
    """A positive number that is the same in every process."""
    return int.from_bytes(text.encode()[:7].ljust(7, b"\0"), "big") or 1


def follow() -> None:
    """Prepares a rank that is not the first one, whose end the first one decides."""
    # A terminal sends its interrupt to the leader as well, which shuts this rank down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Python's own handlers do not run during a receive.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
