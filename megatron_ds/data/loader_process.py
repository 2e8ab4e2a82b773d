"""A process that reads micro-batches ahead of the trainer, into memory that both share.

The memory holds a ring of micro-batches. One pipe informs the trainer which of them are complete,
another informs the process which may be overwritten. Knows a dataset and positions, but no ranks
and no torch.
"""

from __future__ import annotations

import atexit
import math
import mmap
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from megatron_ds.config.problems import UserError
from megatron_ds.data.child_process import die_with_parent
from megatron_ds.data.sample import Samples
from megatron_ds.data.token_dataset import SampleReading, TokenDataset

TOKENS_AHEAD = 1 << 20
"""Tokens that a process reads ahead, 4 MiB, or 5 with marks; it reads 2 to 256 micro-batches ahead
in any case."""
COMPLETE = b"\0"
"""Report of the process: a micro-batch is complete."""
FAILED = b"\1"
"""Report of the process: an error was sent instead."""
PIPE_READ = 1 << 12


class ReadAhead:
    """Micro-batches that are read, or begun because parts of them have to be downloaded.

    Args:
        dataset: The samples.
        micro_batch_size: Samples per micro-batch, from consecutive positions.
    """

    def __init__(self, dataset: TokenDataset, micro_batch_size: int) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._begun: deque[SampleReading] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    def is_busy(self) -> bool:
        """Whether a further micro-batch would only wait for the downloads before it.

        Raises:
            UserError: If a download fails.
        """
        cache = self._dataset.cache
        return bool(self._begun) and cache is not None and cache.fetcher.is_busy()

    @property
    def is_next_complete(self) -> bool:
        """Whether `take` does not wait."""
        return bool(self._begun) and self._begun[0].is_complete

    def begin(self, first: int, samples: Samples | None = None) -> None:
        """Begins to read a micro-batch into the memory of `samples`, or into new memory."""
        positions = range(first, first + self._micro_batch_size)
        self._begun.append(SampleReading(self._dataset, positions, samples))

    def take(self) -> Samples:
        """Finishes the oldest micro-batch.

        Raises:
            UserError: If a sample is invalid, or a download fails.
        """
        return self._begun.popleft().finish()


class LoaderProcess:
    """Reads micro-batches in order, in a separate process.

    Args:
        dataset: The samples.
        firsts: Position of the first sample of each micro-batch.
        micro_batch_size: Samples per micro-batch, from consecutive positions.
    """

    def __init__(self, dataset: TokenDataset, firsts: Sequence[int], micro_batch_size: int) -> None:
        shape = (micro_batch_size, dataset.seq_length + 1)
        self._slots = min(256, max(2, TOKENS_AHEAD // (shape[0] * shape[1])))
        self._micro_batch_size = micro_batch_size
        ring_shape = self._slots, *shape
        size = math.prod(ring_shape)
        ids = np.frombuffer(mmap.mmap(-1, 4 * size), dtype=np.int32).reshape(ring_shape)
        marks = None
        if dataset.marks:
            marks = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8).reshape(ring_shape)
        self._ring = Samples(ids, marks)
        self._read = 0
        self._returned = 0
        self._complete = 0
        self._failed = False
        self._owner = os.getpid()
        self._reports, reports = os.pipe()
        free, self._free = os.pipe()
        context = multiprocessing.get_context("fork")
        self._errors, errors = context.Pipe(duplex=False)
        self._process = context.Process(
            target=self._serve, args=(dataset, firsts, reports, free, errors), daemon=True
        )
        self._process.start()
        os.close(reports)
        os.close(free)
        errors.close()
        # At exit, multiprocessing would terminate the process and wait; but it ignores SIGTERM.
        atexit.register(self.stop)

    def read(self) -> Samples:
        """Reads the next micro-batch into new memory.

        Raises:
            UserError: If a sample is invalid or a file is damaged.
            RuntimeError: If the process failed otherwise.
        """
        while self._read == self._complete:
            self._wait()
        samples = self._ring.at(self._read % self._slots).copy()
        self._read += 1
        # Half of the ring at once: a system call takes about as long as reading a sample.
        unreturned = self._read - self._returned
        if unreturned >= self._slots // 2:
            with suppress(BrokenPipeError):  # the process has read everything
                os.write(self._free, bytes(unreturned))
            self._returned = self._read
        return samples

    def stop(self) -> None:
        """Kills the process. Files that it may be writing, indexes, are replaced atomically."""
        if self._owner != os.getpid():  # already stopped, or inherited by another process
            return
        self._owner = 0
        atexit.unregister(self.stop)
        self._process.kill()
        self._process.join()
        os.close(self._reports)
        os.close(self._free)
        self._errors.close()

    def _wait(self) -> None:
        """Waits until a micro-batch is complete, or raises the error of the process."""
        if not self._failed:
            reports = os.read(self._reports, PIPE_READ)
            complete = reports.count(COMPLETE)
            self._complete += complete
            self._failed = complete < len(reports) or not reports
            if complete:
                return
        try:
            error = self._errors.recv()
        except EOFError:
            self._process.join()
            pid = self._process.pid
            signum = -(self._process.exitcode or 0)
            text = f"data loader process (pid {pid}) was killed by signal {signum}"
            raise RuntimeError(text) from None
        raise error

    def _serve(
        self,
        dataset: TokenDataset,
        firsts: Sequence[int],
        reports: int,
        free: int,
        errors: Connection,
    ) -> None:
        """The work of the process."""
        die_with_parent()
        for end in (self._reports, self._free):  # here they would hide that the parent closed them
            os.close(end)
        ahead = ReadAhead(dataset, self._micro_batch_size)
        free_slots = self._slots
        index = 0
        try:
            while index < len(firsts) or ahead:
                if index < len(firsts) and free_slots and not ahead.is_busy():
                    ahead.begin(firsts[index], self._ring.at(index % self._slots))
                    index += 1
                    free_slots -= 1
                elif not ahead:
                    free_slots = len(os.read(free, PIPE_READ))
                    if not free_slots:
                        return
                    continue
                else:
                    ahead.take()
                    os.write(reports, COMPLETE)
                while ahead.is_next_complete:
                    ahead.take()
                    os.write(reports, COMPLETE)
        except BrokenPipeError:
            return
        except Exception as error:
            text = f"the data loader process failed:\n{traceback.format_exc()}"
            os.write(reports, FAILED)
            errors.send(error if isinstance(error, UserError) else RuntimeError(text))
