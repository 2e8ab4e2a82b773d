"""Micro-batches on the device, copied while the one before is computed.

Owns the copy, and the derivation of inputs, labels and loss mask from a sample's tokens. One int32
array per micro-batch crosses from the host; everything else is made on the device. Of the ranks
that process the same samples (tensor and sequence parallelism) only the first reads it and sends it
to its peer ranks.

Shapes: B micro-batch, S sequence, T = S + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron_ds.data.gpt_dataset import END_MARK
from megatron_ds.data.micro_batches import Batch
from megatron_ds.parallel.mesh import Group

NUM_BUFFERS = 2
"""Pinned buffers: one is copied to the device while the other is filled."""


class DeviceBatch(NamedTuple):
    """One micro-batch on the device; inputs and labels are views of one tensor."""

    tokens_BS: Tensor
    """int64, the inputs; with END_MARK if the model looks for marked ends of documents."""
    labels_BS: Tensor
    """int64, the token that follows each input."""
    loss_mask_BS: Tensor | None
    """float32, 0 for tokens without loss; None for loss everywhere."""
    position: int
    """Position of the first sample in the data order."""
    max_documents: int | None = None
    """At least the number of documents in the inputs; None: unknown on the host."""

    def truncated(self, length: int) -> DeviceBatch:
        """Truncate each sample to its first `length` tokens."""
        if length >= self.tokens_BS.shape[1]:
            return self
        mask_BS = None if self.loss_mask_BS is None else self.loss_mask_BS[:, :length]
        return self._replace(
            tokens_BS=self.tokens_BS[:, :length],
            labels_BS=self.labels_BS[:, :length],
            loss_mask_BS=mask_BS,
        )

    def num_counted(self) -> Tensor | int:
        """Number of tokens with loss: known, or an unsynchronized int64 scalar."""
        if self.loss_mask_BS is None:
            return self.tokens_BS.numel()
        return self.loss_mask_BS.sum(dtype=torch.int64)

    def num_bytes(self, token_bytes: Tensor) -> Tensor:
        """Bytes of the text of the labels with loss, by the bytes of each id: a float64 scalar."""
        sizes_BS = token_bytes[self.labels_BS].double()
        return (sizes_BS if self.loss_mask_BS is None else sizes_BS * self.loss_mask_BS).sum()


class DeviceBatches:
    """The micro-batches of an iterator, on the device.

    On an accelerator with streams the next micro-batch is read and copied on a side stream before
    the current one is returned: an exception in reading it is raised when it is due.

    Args:
        batches: Micro-batches on the host, used on the group's first rank only.
        device: Device of this process.
        sharing: Ranks that process the same samples.
        accelerator: DeepSpeed's accelerator; a test may pass another.
        document_end: Id of the token that ends a document, if documents are to be counted.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        device: torch.device,
        sharing: Group,
        accelerator: Any = None,
        *,
        document_end: int | None = None,
    ) -> None:
        self._batches, self._device, self._sharing = batches, device, sharing
        self._document_end = document_end
        accelerator = get_accelerator() if accelerator is None else accelerator
        self._copies = None if accelerator.Stream is None else _Copies(accelerator, device)
        self._next: tuple[Batch, Tensor | None] | Exception | None = None

    def __iter__(self) -> DeviceBatches:
        return self

    def __next__(self) -> DeviceBatch:
        current = self._stage() if self._next is None else self._next
        self._next = None
        if isinstance(current, Exception):
            raise current
        batch, rows = current
        if rows is None:
            rows = torch.empty(batch.shape, dtype=torch.int32, device=self._device)
        elif self._copies is not None:
            self._copies.wait_for(rows)
        if self._sharing.size > 1:
            dist.broadcast(rows, src=self._sharing.ranks[0], group=self._sharing.handle)
        if self._copies is not None:
            try:
                self._next = self._stage()
            except Exception as error:  # the data ended, or a sample cannot be read
                self._next = error
        return _on_device(batch, rows, self._document_end)

    def close(self) -> None:
        """End the iteration, and the loader processes of the host's iterator."""
        self._next = StopIteration()
        with suppress(AttributeError):
            self._batches.close()  # type: ignore[attr-defined]

    def _stage(self) -> tuple[Batch, Tensor | None]:
        """Read the next micro-batch and start its copy."""
        batch = next(self._batches)
        if batch.rows_BT is None or self._sharing.rank > 0:
            return batch, None
        if self._copies is not None:
            return batch, self._copies.start(batch.rows_BT)
        rows = torch.from_numpy(batch.rows_BT)
        return batch, rows.to(self._device)


class _Copies:
    """Asynchronous copies to an accelerator, through pinned buffers of its own."""

    def __init__(self, accelerator: Any, device: torch.device) -> None:
        self._accelerator, self._device = accelerator, device
        self._stream = accelerator.Stream()
        self._buffers: list[Tensor] = []
        self._copied = [accelerator.Event() for _ in range(NUM_BUFFERS)]
        self._count = 0

    def start(self, rows_BT: np.ndarray[Any, Any]) -> Tensor:
        """Start the copy of an array; the result is complete on the side stream only."""
        if not self._buffers or self._buffers[0].shape != rows_BT.shape:
            empty = torch.empty(rows_BT.shape, dtype=torch.int32)
            self._buffers = [self._accelerator.pin_memory(empty) for _ in range(NUM_BUFFERS)]
        index = self._count % NUM_BUFFERS
        if self._count >= NUM_BUFFERS:
            # The copy from this buffer started NUM_BUFFERS micro-batches ago.
            self._copied[index].synchronize()
        self._count += 1
        buffer = self._buffers[index]
        np.copyto(buffer.numpy(), rows_BT)
        with self._accelerator.stream(self._stream):
            rows = buffer.to(self._device, non_blocking=True)
            self._copied[index].record(self._stream)
        return rows

    def wait_for(self, rows: Tensor) -> None:
        """Make the current stream wait for the last copy that was started."""
        current = self._accelerator.current_stream()
        current.wait_event(self._copied[(self._count - 1) % NUM_BUFFERS])
        # The allocator must not reuse the memory for a later copy before this stream has read it.
        rows.record_stream(current)


def _on_device(batch: Batch, rows_BT: Tensor, document_end: int | None) -> DeviceBatch:
    ids_BT, mask_BS, ends = rows_BT.long(), None, [document_end]
    if batch.has_masks:
        mask_BS = (ids_BT[:, 1:] >= 0).float()
        ids_BT = torch.where(ids_BT < 0, ~ids_BT, ids_BT)
        ends += [] if document_end is None else [~document_end]
    tokens_BS, labels_BS = ids_BT[:, :-1], ids_BT[:, 1:]
    if batch.eod is not None:
        is_end_BS = tokens_BS >= END_MARK if batch.has_ends else tokens_BS == batch.eod
        eod_mask_BS = (~is_end_BS).float()
        mask_BS = eod_mask_BS if mask_BS is None else mask_BS * eod_mask_BS
    if batch.has_ends:
        labels_BS = labels_BS % END_MARK
        tokens_BS = tokens_BS if document_end == END_MARK else tokens_BS % END_MARK
    max_documents = None
    if document_end is not None and batch.rows_BT is not None:
        rows = batch.rows_BT & END_MARK if batch.has_ends else batch.rows_BT
        counts = (int(np.count_nonzero(rows == end)) for end in ends)
        max_documents = batch.shape[0] + sum(counts)
    return DeviceBatch(tokens_BS, labels_BS, mask_BS, batch.position, max_documents)
