"""Sends and receives between pipeline stages, in a process group of their own, both directions at
once.

DeepSpeed sends each by itself in the group of all processes, where it waits for their collectives,
and blocks the device until the other stage receives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed.comm
import torch.distributed as dist
from deepspeed.runtime.pipe import p2p
from torch import Tensor

from megatron_ds.engine.deepspeed.patches import replaced
from megatron_ds.parallel.mesh import Mesh


class StageMessages:
    """Takes the place of DeepSpeed's functions that send and receive.

    Args:
        mesh: Mesh of this process, with pipeline stages.
        are_batched: Start what a stage sends to another and what it receives from it together, as
            1F1B allows. The instructions of DualPipeV make batches themselves.
    """

    def __init__(self, mesh: Mesh, *, are_batched: bool) -> None:
        self._pp = mesh.pp
        self._group = mesh.p2p.handle
        self._are_batched = are_batched
        self._queue: list[dist.P2POp] = []
        self._works: list[dist.Work] = []
        """Handles of started sends and receives."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, DeepSpeed's engines send and receive by this object."""
        with (
            replaced(p2p, "send", partial(self._add, dist.isend)),
            replaced(p2p, "recv", partial(self._add, dist.irecv)),
            replaced(deepspeed.comm, "P2POp", partial(deepspeed.comm.P2POp, group=self._group)),
        ):
            yield
            self.exchange(wait=True)

    def _add(self, operation: Callable[..., Any], tensor: Tensor, stage: int) -> None:
        self._queue.append(dist.P2POp(operation, tensor, self._pp.ranks[stage], self._group))
        # A gradient, from the next stage, is read by the backward pass only.
        is_read = operation is dist.irecv and stage < self._pp.rank
        if is_read or not self._are_batched:
            self.exchange(wait=True)

    def exchange(self, *, wait: bool = False) -> None:
        """Start the queued sends and receives; wait for all of them if one is a receive, or if
        `wait`."""
        wait |= any(message.op is dist.irecv for message in self._queue)
        if self._queue:
            self._works += dist.batch_isend_irecv(self._queue)
        self._queue = []
        while wait and self._works:
            self._works.pop(0).wait()
