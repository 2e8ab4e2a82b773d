"""Micro-batches for one data-parallel rank, in an order that seed and consumed samples alone
decide.

Knows a dataset and three integers (consumed samples, rank, number of ranks); no process group and
no device. Legend: B micro-batch, S sequence.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_ds.data.gpt_dataset import SampleArray, TokenDataset, read_samples

T = TypeVar("T")

SAMPLES_PER_MESSAGE = 256
"""A loader process sends so many at once: torch's loader takes about as long for one as for ten."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""


class Batch(NamedTuple):
    """One micro-batch on the CPU, to be read only: inputs and labels are views of one array."""

    tokens_BS: torch.Tensor
    """int64, the inputs."""
    labels_BS: torch.Tensor
    """int64, for each input the token that follows."""
    loss_mask_BS: torch.Tensor
    """float32, 0 where no loss is taken."""
    position: int
    """Place of the first sample in the data order: samples consumed before it by all ranks."""

    def truncated(self, length: int) -> Batch:
        """The first `length` tokens of each sample, or all where there are no more."""
        if length >= self.tokens_BS.shape[1]:
            return self
        parts = (value[:, :length] if isinstance(value, torch.Tensor) else value for value in self)
        return Batch._make(parts)


class MicroBatchIterator:
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
        self._micro_batch_size = micro_batch_size
        self._rows = _RowsDataset(dataset, micro_batch_size)
        self._num_workers = num_workers
        self._eod = eod
        self._iterator: Iterator[tuple[int, SampleArray | _DataError]] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Micro-steps from `consumed` to the end of the dataset."""
        return len(self._positions)

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._reading()
        position, rows = next(self._iterator)
        if isinstance(rows, _DataError):
            raise ValueError(rows.why)
        return collate(rows, position, self._eod)

    def close(self) -> None:
        """End the loader processes. The iterator gives nothing more."""
        self._closed = True
        self._iterator = None

    def _reading(self) -> Iterator[tuple[int, SampleArray | _DataError]]:
        if not self._num_workers:
            return map(self._rows.read, self._positions)
        together = max(1, SAMPLES_PER_MESSAGE // self._micro_batch_size)
        return itertools.chain.from_iterable(
            DataLoader(
                self._rows,
                batch_size=None,
                sampler=_PositionBatches(self._positions, together),
                num_workers=self._num_workers,
                # Arrays come through the pipe. Each tensor would come as a descriptor that has to
                # be asked for: several milliseconds on a busy machine.
                collate_fn=_identity,
                # Else the loader would draw from torch's global generator, and dropout with it.
                generator=torch.Generator(),
                worker_init_fn=_die_with_parent,
            )
        )


def _identity(sent: T) -> T:
    return sent


def _die_with_parent(worker: int) -> None:
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
class _DataError:
    """What a loader process sends for data that is not what it should be: an exception would come
    out of torch's loader wrapped into a traceback."""

    why: str


@dataclass(frozen=True)
class _PositionBatches:
    """Positions, `size` at a time: one after the other, since a run may have billions."""

    positions: range
    size: int

    def __len__(self) -> int:
        return -(-len(self.positions) // self.size)

    def __iter__(self) -> Iterator[range]:
        for first in range(0, len(self.positions), self.size):
            yield self.positions[first : first + self.size]


class _RowsDataset(Dataset["list[tuple[int, SampleArray | _DataError]]"]):
    """The samples of micro-batches, [B, S + 1] each, by the positions of their first."""

    def __init__(self, dataset: TokenDataset, micro_batch_size: int) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size

    def __getitem__(self, positions: Sequence[int]) -> list[tuple[int, SampleArray | _DataError]]:
        """What a loader process sends at once, in as few bytes as the tokens take."""
        return [(position, _narrow_dtype(rows)) for position, rows in map(self.read, positions)]

    def read(self, position: int) -> tuple[int, SampleArray | _DataError]:
        try:
            return position, read_samples(
                self._dataset, range(position, position + self._micro_batch_size)
            )
        except ValueError as error:
            return position, _DataError(str(error))


def _narrow_dtype(rows: SampleArray | _DataError) -> SampleArray | _DataError:
    if isinstance(rows, _DataError):
        return rows
    smallest = np.min_scalar_type(rows.max(initial=0))
    return rows.astype(smallest) if rows.min(initial=0) >= 0 else rows


def collate(rows: SampleArray, position: int, eod: int | None) -> Batch:
    """Samples [B, S + 1] of any integer type to one micro-batch."""
    both = torch.from_numpy(rows.astype(np.int64, copy=False))
    tokens_BS, labels_BS = both[:, :-1], both[:, 1:]
    if eod is None:
        mask_BS = _ones(tokens_BS.shape)
    else:
        mask_BS = (tokens_BS != eod).to(torch.float32)
    return Batch(tokens_BS, labels_BS, mask_BS, position)


@functools.lru_cache(maxsize=2)
def _ones(shape: torch.Size) -> torch.Tensor:
    """The mask that takes loss everywhere, which all micro-batches share."""
    return torch.ones(shape, dtype=torch.float32)
