"""Micro-batches of one data-parallel rank, in an order determined by seed and consumed samples.

Knows a dataset and three integers (consumed samples, rank, number of ranks), but no process group
and no device. Shapes: B micro-batch, S sequence, T = S + 1.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Sequence
from typing import NamedTuple

from megatron_ds.data.loader_process import LoaderProcess, ReadAhead
from megatron_ds.data.sample import NO_MARKS, Mark, Samples
from megatron_ds.data.token_dataset import TokenDataset

BEGUN_AHEAD = 32
"""Micro-batches of data by URL that are begun before the first of them is needed, in this process.
More would not stay in the processor's caches."""


class Batch(NamedTuple):
    """One micro-batch on the host."""

    samples: Samples | None
    """[B, T]: T is S + 1, since inputs and labels are the same ids without their last and their
    first one. Read-only. None if another rank reads them."""
    shape: tuple[int, int]
    """Shape of the samples."""
    position: int
    """Position of the first sample in the data order: samples before it, over all ranks."""
    marks: Mark = NO_MARKS
    """The marks that tokens may have. Without any, the samples have no array of marks."""


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
        reads: Read the samples. If False, batches have positions only, because another rank of the
            tensor-parallel group reads and sends them.
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
        reads: bool = True,
    ) -> None:
        assert 0 <= dp_rank < dp_size
        assert micro_batch_size > 0
        assert consumed >= 0
        per_step = dp_size * micro_batch_size
        steps = max(0, (len(dataset) - consumed) // per_step)
        first = consumed + dp_rank * micro_batch_size
        self._positions = range(first, first + steps * per_step, per_step)
        self._shape = micro_batch_size, dataset.seq_length + 1
        self._marks = dataset.marks
        self._samples: Generator[tuple[int, Samples | None], None, None]
        if reads:
            self._samples = _read_all(dataset, self._positions, micro_batch_size, num_workers)
        else:
            self._samples = ((position, None) for position in self._positions)

    def __len__(self) -> int:
        """Number of micro-steps to the end of the dataset."""
        return len(self._positions)

    def __iter__(self) -> MicroBatchIterator:
        return self

    def __next__(self) -> Batch:
        position, samples = next(self._samples)
        return Batch(samples, self._shape, position, self._marks)

    def close(self) -> None:
        """Ends the loader processes and the iteration."""
        self._samples.close()


def _read_all(
    dataset: TokenDataset, firsts: Sequence[int], micro_batch_size: int, num_workers: int
) -> Generator[tuple[int, Samples], None, None]:
    """Reads all micro-batches: position of the first sample, and samples."""
    if not num_workers:
        begun = deque[int]()
        ahead = ReadAhead(dataset, micro_batch_size)
        most = 1 if dataset.cache is None else BEGUN_AHEAD
        for first in firsts:
            begun.append(first)
            ahead.begin(first)
            if len(ahead) == most or ahead.is_busy():
                yield begun.popleft(), ahead.take()
        while ahead:
            yield begun.popleft(), ahead.take()
        return
    processes: list[LoaderProcess] = []
    try:
        for worker in range(min(num_workers, len(firsts))):
            processes.append(LoaderProcess(dataset, firsts[worker::num_workers], micro_batch_size))
        for first, process in zip(firsts, itertools.cycle(processes), strict=False):
            yield first, process.read()
    finally:
        for process in processes:
            process.stop()
