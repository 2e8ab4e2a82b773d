"""Runs work on one rank or on all, so that every rank learns each result and each error.

The messages have a process group of their own: while a slow disk holds up one rank, its peers wait
in this group, and no collective of the run can time out. Knows nothing of checkpoints.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from megatron_ds.launch import environment

T = TypeVar("T")
R = TypeVar("R")
TIMEOUT = timedelta(hours=6)
"""Longest time that one rank may spend on files while its peer ranks wait."""


@dataclass(frozen=True)
class RankWork:
    """Work with files, and which ranks do it."""

    run: Callable[[], Any]
    on_all: bool
    """Whether every rank runs it; otherwise only the first rank does."""
    merge: Callable[[list[Any]], Any] = list
    """Makes one result of all ranks' results, on the first one. It is sent to every rank: without
    it all results are, whose traffic grows with the square of the ranks."""


class Outcome(NamedTuple):
    """Result or I/O error of this rank's work."""

    result: Any = None
    error: Exception | None = None


class CollectiveIO:
    """File I/O whose results and errors all ranks share. Methods are collective unless noted."""

    def __init__(self) -> None:
        """Creates the process group; gloo on every device, since messages are in host memory."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
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

    def scatter_from_rank0(self, run: Callable[[], list[T]]) -> T:
        """Runs work on the first rank, which gives each rank its result, or all its error."""
        outcome = self.do_own(RankWork(run, on_all=False))
        self._share_first(Outcome(error=outcome.error))
        received: list[Any] = outcome.result
        if self._group is not None:
            received = [None]
            dist.scatter_object_list(received, outcome.result, src=0, group=self._group)
        (item,) = received
        result: T = item
        return result

    def run_merged(self, run: Callable[[], T], merge: Callable[[list[T]], R]) -> R:
        """Runs work on every rank; every rank returns what `merge` makes of the results on the
        first rank, or raises the first error."""
        work = RankWork(run, on_all=True, merge=merge)
        done: R = self.share(work, self.do_own(work))
        return done

    def run_on_all(self, run: Callable[[], T]) -> list[T]:
        """Runs work on every rank; every rank returns all results or raises the first error."""
        return self.run_merged(run, list)

    def do_own(self, work: RankWork) -> Outcome:
        """Does this rank's part. Local, in any thread."""
        if not work.on_all and self.rank != 0:
            return Outcome()
        try:
            return Outcome(work.run())
        except (OSError, ValueError) as error:
            return Outcome(error=_with_host(error))

    def share(self, work: RankWork, outcome: Outcome) -> Any:
        """Returns to every rank what `run_on_rank0` or `run_on_all` returns, or raises the same.

        Args:
            work: The work, the same on every rank.
            outcome: Outcome of this rank's work.
        """
        return self._share_first(self._merged(work, outcome) if work.on_all else outcome)

    def is_true_on_all(self, value: bool) -> bool:
        """Whether a condition holds on every rank."""
        if self._group is None:
            return value
        holds = torch.tensor([value], dtype=torch.uint8)
        dist.all_reduce(holds, op=dist.ReduceOp.MIN, group=self._group)
        return bool(holds)

    def total(self, value: int) -> int:
        """The sum of the values of all ranks."""
        if self._group is None:
            return value
        total = torch.tensor([value])
        dist.all_reduce(total, group=self._group)
        return int(total)

    def _share_first(self, outcome: Outcome) -> Any:
        answer: list[Any] = [outcome]
        if self._group is not None:
            dist.broadcast_object_list(answer, src=0, group=self._group)
        (first,) = answer
        if first.error is not None:
            raise first.error.with_traceback(None)
        return first.result

    def _merged(self, work: RankWork, outcome: Outcome) -> Outcome:
        """Gathers the outcomes of all ranks on the first rank and merges them; the first error is
        the result if there are any."""
        answers = self._gather_on_first(outcome)
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                who = f"rank {rank}: " if len(answers) > 1 else ""
                error_type = OSError if isinstance(error, OSError) else ValueError
                return Outcome(error=error_type(f"{who}{error}"))
        return Outcome(work.merge([answer.result for answer in answers])) if answers else Outcome()

    def _gather_on_first(self, outcome: Outcome) -> list[Outcome]:
        """The outcomes of all ranks on the first one, by rank; none on other ranks.

        `dist.gather_object` would send the sizes of all to all.
        """
        if self._group is None:
            return [outcome]
        content = torch.frombuffer(bytearray(ForkingPickler.dumps(outcome)), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        dist.all_reduce(size, op=dist.ReduceOp.MAX, group=self._group)
        padded = torch.nn.functional.pad(content, (0, int(size) - len(content)))
        parts = [torch.empty_like(padded) for _ in range(self.world_size)] if self.rank == 0 else []
        dist.gather(padded, parts or None, dst=0, group=self._group)
        return [ForkingPickler.loads(part.numpy().tobytes()) for part in parts]


def joined(parts: list[list[T]]) -> list[T]:
    """Merges the lists of all ranks."""
    return [*itertools.chain(*parts)]


def _with_host(error: OSError | ValueError) -> OSError | ValueError:
    """The error of a system call names the host, in a run on several."""
    host = environment.host_suffix()
    if not host or not isinstance(error, OSError) or error.errno is None:
        return error
    text = f"{error.strerror}{host}"
    return OSError(error.errno, text, error.filename, None, error.filename2)
