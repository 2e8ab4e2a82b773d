"""Micro-batches of one data-parallel rank, in an order determined by seed and consumed samples.

Knows a dataset and three integers (consumed samples, rank, number of ranks), but no process group
and no device. Shapes: B micro-batch, S sequence.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron_ds.config.problems import UserError
from megatron_ds.data.gpt_dataset import SampleArray, TokenDataset, read_samples

SAMPLES_PER_MESSAGE = 256
"""Samples that a loader process sends at once: a message costs as much as ten samples."""
PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that a process gets when its parent exits."""


class Batch(NamedTuple):
    """One micro-batch on the CPU, read-only: inputs and labels are views of one array."""

    tokens_BS: torch.Tensor
    """int64, the inputs."""
    labels_BS: torch.Tensor
    """int64, the token that follows each input."""
    loss_mask_BS: torch.Tensor
    """float32, 0 for tokens without loss."""
    position: int
    """Position of the first sample in the data order: samples before it, over all ranks."""

    def truncated(self, length: int) -> Batch:
        """Truncates each sample to its first `length` tokens."""
        if length >= self.tokens_BS.shape[1]:
            return self
        tokens_BS, labels_BS, mask_BS = (value[:, :length] for value in self[:3])
        return Batch(tokens_BS, labels_BS, mask_BS, self.position)


class MicroBatchIterator:
    """The micro-batches of one data-parallel rank, after `consumed` samples.

    Micro-step k of rank r consists of the `micro_batch_size` samples from position
    consumed + (k * dp_size + r) * micro_batch_size on: together, any number of ranks reads the data
    order without a gap. Stops on all ranks at the same micro-step, when fewer than
    dp_size * micro_batch_size samples are left.

    Args:
        dataset: The samples, in data order.
        consumed: Samples consumed by all ranks.
        micro_batch_size: Samples per micro-batch.
        dp_rank: Data-parallel rank.
        dp_size: Number of data-parallel ranks.
        num_workers: Loader processes; 0 reads in this process. Does not change the order.
        eod: Token id without loss; None for loss everywhere.
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
        assert 0 <= dp_rank < dp_size
        assert micro_batch_size > 0
        assert consumed >= 0
        per_step = dp_size * micro_batch_size
        steps = max(0, (len(dataset) - consumed) // per_step)
        first = consumed + dp_rank * micro_batch_size
        self._positions = range(first, first + steps * per_step, per_step)
        self._micro_batch_size = micro_batch_size
        self._rows = _MicroBatchDataset(dataset, micro_batch_size)
        self._num_workers = num_workers
        self._eod = eod
        self._iterator: Iterator[tuple[int, SampleArray | UserError]] | None = None
        self._closed = False

    def __len__(self) -> int:
        """Number of micro-steps to the end of the dataset."""
        return len(self._positions)

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> Batch:
        if self._closed:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._read_all()
        position, rows = next(self._iterator)
        if isinstance(rows, UserError):
            raise rows
        return collate(rows, position, self._eod)

    def close(self) -> None:
        """Ends the loader processes and the iteration."""
        self._closed = True
        self._iterator = None

    def _read_all(self) -> Iterator[tuple[int, SampleArray | UserError]]:
        if not self._num_workers:
            return map(self._rows.read, self._positions)
        every, size = self._positions, max(1, SAMPLES_PER_MESSAGE // self._micro_batch_size)
        return itertools.chain.from_iterable(
            DataLoader(
                self._rows,
                batch_size=None,
                sampler=(every[at : at + size] for at in range(0, len(every), size)),
                num_workers=self._num_workers,
                # numpy arrays are sent through the pipe. torch would send a file descriptor for
                # each tensor, which costs several milliseconds on a busy machine.
                collate_fn=list,
                # By default the loader draws from torch's global generator, which dropout uses.
                generator=torch.Generator(),
                worker_init_fn=_die_with_parent,
            )
        )


def _die_with_parent(worker: int) -> None:
    """Makes a loader process exit with the trainer, neither before nor after it.

    Launchers and terminals send signals to every process of a run, but the trainer still needs its
    loader to finish the step and save. If the trainer is killed, the loader must exit at once
    (supported by Linux only): it holds the trainer's connections open, and the other ranks would
    keep waiting for them.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


class _MicroBatchDataset(Dataset["list[tuple[int, SampleArray | UserError]]"]):
    """Maps the positions of first samples to the samples of micro-batches, [B, S + 1] each.

    A user's error is returned: torch's loader would wrap an exception in a traceback.
    """

    def __init__(self, dataset: TokenDataset, micro_batch_size: int) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size

    def __getitem__(self, positions: Sequence[int]) -> list[tuple[int, SampleArray | UserError]]:
        """One message of a loader process, in the smallest integer type."""
        return [(position, _narrow_dtype(rows)) for position, rows in map(self.read, positions)]

    def read(self, position: int) -> tuple[int, SampleArray | UserError]:
        positions = range(position, position + self._micro_batch_size)
        try:
            return position, read_samples(self._dataset, positions)
        except UserError as error:
            return position, error


def _narrow_dtype(rows: SampleArray | UserError) -> SampleArray | UserError:
    if isinstance(rows, UserError) or rows.min(initial=0) < 0:
        return rows
    return rows.astype(np.min_scalar_type(rows.max(initial=0)))


def collate(rows: SampleArray, position: int, eod: int | None) -> Batch:
    """Makes a micro-batch of samples [B, S + 1] of any integer type."""
    both = torch.from_numpy(rows.astype(np.int64, copy=False))
    tokens_BS, labels_BS = both[:, :-1], both[:, 1:]
    mask_BS = _ones(tokens_BS.shape) if eod is None else (tokens_BS != eod).to(torch.float32)
    return Batch(tokens_BS, labels_BS, mask_BS, position)


@functools.lru_cache(maxsize=2)
def _ones(shape: torch.Size) -> torch.Tensor:
    """A mask with loss everywhere, shared by all micro-batches."""
    return torch.ones(shape, dtype=torch.float32)
