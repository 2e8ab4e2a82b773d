"""Micro-batches for one data-parallel rank, in an order that seed and consumed samples alone
decide.

Knows a dataset and three integers (consumed samples, rank, number of ranks); no process group and
no device. Legend: B micro-batch, S sequence.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_ds.data.gpt_dataset import Rows, TokenDataset, read

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""


class Batch(NamedTuple):
    """One micro-batch on the CPU."""

    tokens_BS: torch.Tensor
    """int64, the inputs."""
    labels_BS: torch.Tensor
    """int64, for each input the token that follows."""
    loss_mask_BS: torch.Tensor
    """float32, 0 where no loss is taken."""
    position: int
    """Place of the first sample in the data order: samples consumed before it by all ranks."""

    def cut(self, length: int) -> Batch:
        """The first `length` tokens of each sample, or all where there are no more."""
        if length >= self.tokens_BS.shape[1]:
            return self
        parts = (
            value[:, :length].contiguous() if isinstance(value, torch.Tensor) else value
            for value in self
        )
        return Batch._make(parts)


class MicroBatches:
    """The micro-batches of one data-parallel rank from `consumed` samples on.

    Micro-step k of rank r takes samples [consumed + (k * dp_size + r) * micro_batch_size,
    + micro_batch_size), so that the ranks together read the data order without a gap, whatever
    their number. Ends, on all ranks at the same step, when the dataset has no further step of
    dp_size * micro_batch_size samples.

    num_workers: loader processes that read ahead; 0 reads in this process. The order is the same.
    eod: id whose positions get no loss; None takes loss everywhere.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        consumed: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
        eod: int | None = None,
    ) -> None:
        if not 0 <= dp_rank < dp_size or micro_batch_size < 1 or consumed < 0:
            raise ValueError(
                f"no micro-batches of {micro_batch_size} for rank {dp_rank} of {dp_size} after "
                f"{consumed} samples"
            )
        per_step = dp_size * micro_batch_size
        steps = max(0, (len(dataset) - consumed) // per_step)
        first = consumed + dp_rank * micro_batch_size
        self._positions = range(first, first + steps * per_step, per_step)
        self._rows = _RowsDataset(dataset, micro_batch_size)
        self._num_workers = num_workers
        self._eod = eod
        self._iterator: Iterator[tuple[int, Rows | _Refused]] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Micro-steps from `consumed` to the end of the dataset."""
        return len(self._positions)

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._reading()
        position, rows = next(self._iterator)
        if isinstance(rows, _Refused):
            raise ValueError(rows.why)
        return collate(rows, position, self._eod)

    def close(self) -> None:
        """End the loader processes. The iterator gives nothing more."""
        self._closed = True
        self._iterator = None

    def _reading(self) -> Iterator[tuple[int, Rows | _Refused]]:
        if not self._num_workers:
            return map(self._rows.__getitem__, self._positions)
        return iter(
            DataLoader(
                self._rows,
                batch_size=None,
                sampler=self._positions,
                num_workers=self._num_workers,
                # Arrays come through the pipe. Each tensor would come as a descriptor that has to
                # be asked for: several milliseconds on a busy machine.
                collate_fn=_as_it_is,
                # Else the loader would draw from torch's global generator, and dropout with it.
                generator=torch.Generator(),
                worker_init_fn=_end_with_the_trainer,
            )
        )


def _as_it_is(sent: T) -> T:
    return sent


def _end_with_the_trainer(worker: int) -> None:
    """Makes a loader process end with the trainer, neither before it nor after.

    Launchers and terminals end a run by signalling every process of its group, and the trainer is
    to finish its step and save, for which it needs its loader. A trainer that is killed takes its
    loader with it at once, where the system can do that (Linux): it holds the trainer's connections
    open, and the other ranks would go on waiting at them.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


@dataclass(frozen=True)
class _Refused:
    """What a loader process sends for data that is not what it should be: an exception would come
    out of torch's loader wrapped into a traceback."""

    why: str


class _RowsDataset(Dataset["tuple[int, Rows | _Refused]"]):
    """The samples of micro-batches, [B, S + 1] each, by the position of their first."""

    def __init__(self, dataset: TokenDataset, micro_batch_size: int) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size

    def __getitem__(self, position: int) -> tuple[int, Rows | _Refused]:
        try:
            return position, read(self._dataset, range(position, position + self._micro_batch_size))
        except ValueError as error:
            return position, _Refused(str(error))


def collate(rows: Rows, position: int, eod: int | None) -> Batch:
    """Samples [B, S + 1] to one micro-batch."""
    both = torch.from_numpy(rows)
    tokens_BS, labels_BS = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    if eod is None:
        mask_BS = torch.ones(tokens_BS.shape, dtype=torch.float32)
    else:
        mask_BS = (tokens_BS != eod).to(torch.float32)
    return Batch(tokens_BS, labels_BS, mask_BS, position)
