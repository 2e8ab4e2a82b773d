"""Runs work on one rank or on all, so that every rank learns each result and each error.

The messages have a process group of their own: while a slow disk holds up one rank, its peers wait
in this group, and no collective of the training can time out. Knows nothing of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(hours=6)
"""Longest time that one rank may spend on files while the others wait."""


class RankAgreement:
    """Agreement of all ranks about work with files. Methods are collective."""

    def __init__(self) -> None:
        """Creates the process group; gloo on every device, since messages are in host memory."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = None
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Runs `work` on the first rank; every rank returns its result or raises its error."""
        answer: list[Any] = _attempt(work) if self.rank == 0 else [None, None]
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        result, error = answer
        if error is not None:
            raise error.with_traceback(None)
        done: T = result
        return done

    def on_all(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank; every rank returns all results or raises the first error."""
        answers = [_attempt(work)]
        if self._group is not None:
            answers *= self.world_size
            dist.all_gather_object(answers, answers[0], group=self._group)
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                who = f"rank {rank}: " if len(answers) > 1 else ""
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(f"{who}{error}") from error
        return [result for result, _ in answers]


def _attempt(work: Callable[[], Any]) -> list[Any]:
    """Result and None, or None and the error of the disk or of the data read."""
    try:
        return [work(), None]
    except (OSError, ValueError) as error:
        return [None, error]
