"""Runs work on one rank or on all, so that every rank learns each result and each error.

The messages have a process group of their own: while a slow disk holds up one rank, its peers wait
in this group, and no collective of the run can time out. Knows nothing of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = timedelta(hours=6)
"""Longest time that one rank may spend on files while the others wait."""


@dataclass(frozen=True)
class RankWork:
    """Work with files, and which ranks do it."""

    run: Callable[[], Any]
    on_all: bool
    """On every rank; otherwise on the first."""


class Outcome(NamedTuple):
    """Result or I/O error of this rank's work."""

    result: Any = None
    error: Exception | None = None


class CollectiveIO:
    """File I/O whose results and errors all ranks share. Methods are collective unless noted."""

    def __init__(self) -> None:
        """Creates the process group; gloo on every device, since messages are in host memory."""
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._group = None
        if self.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group, for messages of host memory; None for one rank."""
        return self._group

    def run_on_rank0(self, run: Callable[[], T]) -> T:
        """Runs work on the first rank; every rank returns its result or raises its error."""
        work = RankWork(run, on_all=False)
        done: T = self.share(work, self.do_own(work))
        return done

    def run_on_all(self, run: Callable[[], T]) -> list[T]:
        """Runs work on every rank; every rank returns all results or raises the first error."""
        work = RankWork(run, on_all=True)
        done: list[T] = self.share(work, self.do_own(work))
        return done

    def do_own(self, work: RankWork) -> Outcome:
        """Does this rank's part. Local, in any thread."""
        if not work.on_all and self.rank != 0:
            return Outcome()
        try:
            return Outcome(work.run())
        except (OSError, ValueError) as error:
            return Outcome(error=error)

    def share(self, work: RankWork, outcome: Outcome) -> Any:
        """Returns to every rank what `run_on_rank0` or `run_on_all` returns, or raises the same.

        Args:
            work: The work, the same on every rank.
            outcome: Of this rank's part.
        """
        return self._share_all(outcome) if work.on_all else self._share_first(outcome)

    def is_true_on_all(self, value: bool) -> bool:
        """Whether a condition holds on every rank."""
        if self._group is None:
            return value
        holds = torch.tensor([value], dtype=torch.uint8)
        dist.all_reduce(holds, op=dist.ReduceOp.MIN, group=self._group)
        return bool(holds)

    def _share_first(self, outcome: Outcome) -> Any:
        answer: list[Any] = [outcome]
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        (first,) = answer
        if first.error is not None:
            raise first.error.with_traceback(None)
        return first.result

    def _share_all(self, outcome: Outcome) -> list[Any]:
        answers = [outcome] * self.world_size
        if self._group is not None:
            dist.all_gather_object(answers, outcome, group=self._group)
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                who = f"rank {rank}: " if len(answers) > 1 else ""
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(f"{who}{error}") from error
        return [answer.result for answer in answers]
