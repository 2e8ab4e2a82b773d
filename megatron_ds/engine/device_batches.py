"""Micro-batches on the device, copied while the one before is computed.

Owns the copy, and the derivation of inputs, labels, loss weights and documents from samples, before
any rank takes its slice of the sequences. Ids, int32, and marks if there are any, uint8, cross from
the host; everything else is made on the device. Of the ranks that process the same samples (tensor
and sequence parallelism) only the first reads them and sends them to its peer ranks.

Shapes: B micro-batch, S sequence, T = S + 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megatron_ds.data.micro_batches import Batch
from megatron_ds.data.sample import Mark, Samples
from megatron_ds.launch.device import sum_dtype
from megatron_ds.model.attention.packed import Documents, PackingOptions
from megatron_ds.parallel.mesh import Group

NUM_BUFFERS = 2
"""Pinned buffers: one is copied to the device while the other is filled."""


class DeviceBatch(NamedTuple):
    """One micro-batch on the device; inputs and labels are views of one tensor."""

    tokens_BS: Tensor
    """int64, the inputs."""
    labels_BS: Tensor
    """int64, the token that follows each input."""
    loss_weights_BS: Tensor | None
    """float32, 0 for labels without loss; None for loss everywhere."""
    position: int
    """Position of the first sample in the data order."""
    documents: Documents | None = None
    """The documents of the inputs; None if the model ignores their boundaries."""

    def truncated(self, length: int) -> DeviceBatch:
        """Truncate each sample to its first `length` tokens."""
        if length >= self.tokens_BS.shape[1]:
            return self
        weights_BS = self.loss_weights_BS
        documents = self.documents
        return self._replace(
            tokens_BS=self.tokens_BS[:, :length],
            labels_BS=self.labels_BS[:, :length],
            loss_weights_BS=None if weights_BS is None else weights_BS[:, :length],
            documents=None if documents is None else documents.truncated(length),
        )

    def num_counted(self) -> Tensor | int:
        """Number of tokens with loss: known, or an unsynchronized int64 scalar."""
        if self.loss_weights_BS is None:
            return self.tokens_BS.numel()
        return self.loss_weights_BS.sum(dtype=torch.int64)

    def num_bytes(self, token_bytes: Tensor) -> Tensor:
        """Bytes of the text of the labels with loss, by the bytes of each id.

        A scalar in `sum_dtype`.
        """
        sizes_BS = token_bytes[self.labels_BS].to(sum_dtype(token_bytes.device.type))
        return (sizes_BS if self.loss_weights_BS is None else sizes_BS * self.loss_weights_BS).sum()


class DeviceBatches:
    """The micro-batches of an iterator, on the device.

    On an accelerator with streams the next micro-batch is read and copied on a side stream before
    the current one is returned: an exception in reading it is raised when it is due.

    Args:
        batches: Micro-batches on the host, used on the group's first rank only.
        device: Device of this process.
        sharing: Ranks that process the same samples.
        accelerator: DeepSpeed's accelerator; a test may pass another.
        packing: Treatment of document boundaries by the model; None if it ignores them.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        device: torch.device,
        sharing: Group,
        accelerator: Any = None,
        *,
        packing: PackingOptions | None = None,
    ) -> None:
        self._batches = batches
        self._device = device
        self._sharing = sharing
        self._packing = packing
        accelerator = get_accelerator() if accelerator is None else accelerator
        self._copies = None if accelerator.Stream is None else _Copies(accelerator, device)
        self._next: tuple[Batch, list[Tensor]] | Exception | None = None

    def __iter__(self) -> DeviceBatches:
        return self

    def __next__(self) -> DeviceBatch:
        current = self._stage() if self._next is None else self._next
        self._next = None
        if isinstance(current, Exception):
            raise current
        batch, tensors = current
        if not tensors:
            types = [torch.int32, torch.uint8] if batch.marks else [torch.int32]
            tensors = [torch.empty(batch.shape, dtype=t, device=self._device) for t in types]
        elif self._copies is not None:
            self._copies.wait_for(tensors)
        if self._sharing.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=self._sharing.ranks[0], group=self._sharing.handle)
        if self._copies is not None:
            try:
                self._next = self._stage()
            except Exception as error:  # the data ended, or a sample cannot be read
                self._next = error
        return _on_device(batch, tensors, self._packing)

    def close(self) -> None:
        """End the iteration, and the loader processes of the host's iterator."""
        self._next = StopIteration()
        with suppress(AttributeError):
            self._batches.close()  # type: ignore[attr-defined]

    def _stage(self) -> tuple[Batch, list[Tensor]]:
        """Read the next micro-batch and start its copy; no tensors if another rank reads it."""
        batch = next(self._batches)
        if batch.samples is None or self._sharing.rank > 0:
            return batch, []
        arrays = [array for array in batch.samples if array is not None]
        if self._copies is not None:
            return batch, self._copies.start(arrays)
        return batch, [torch.from_numpy(array).to(self._device) for array in arrays]


class _Copies:
    """Asynchronous copies to an accelerator, through pinned buffers of its own."""

    def __init__(self, accelerator: Any, device: torch.device) -> None:
        self._accelerator = accelerator
        self._device = device
        self._stream = accelerator.Stream()
        self._buffers: list[list[Tensor]] = []
        self._copied = [accelerator.Event() for _ in range(NUM_BUFFERS)]
        self._count = 0

    def start(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """Start the copy of arrays; the results are complete on the side stream only."""
        shapes = [array.shape for array in arrays]
        if not self._buffers or [buffer.shape for buffer in self._buffers[0]] != shapes:
            self._buffers = [list(map(self._pinned_like, arrays)) for _ in range(NUM_BUFFERS)]
        index = self._count % NUM_BUFFERS
        if self._count >= NUM_BUFFERS:
            # The copy from these buffers started NUM_BUFFERS micro-batches ago.
            self._copied[index].synchronize()
        self._count += 1
        buffers = self._buffers[index]
        for buffer, array in zip(buffers, arrays, strict=True):
            np.copyto(buffer.numpy(), array)
        with self._accelerator.stream(self._stream):
            tensors = [buffer.to(self._device, non_blocking=True) for buffer in buffers]
            self._copied[index].record(self._stream)
        return tensors

    def wait_for(self, tensors: Sequence[Tensor]) -> None:
        """Make the current stream wait for the last copy that was started."""
        current = self._accelerator.current_stream()
        current.wait_event(self._copied[(self._count - 1) % NUM_BUFFERS])
        for tensor in tensors:
            # The allocator must not reuse the memory for a later copy before this stream has read
            # it.
            tensor.record_stream(current)

    def _pinned_like(self, array: np.ndarray[Any, Any]) -> Tensor:
        pinned: Tensor = self._accelerator.pin_memory(torch.from_numpy(np.empty_like(array)))
        return pinned


def _on_device(
    batch: Batch, tensors: Sequence[Tensor], packing: PackingOptions | None
) -> DeviceBatch:
    """Inputs, labels, loss weights and documents of ids [B, T] and marks [B, T]."""
    ids_BT = tensors[0].long()
    weights_BS = None
    if Mark.NO_LOSS in batch.marks:
        weights_BS = (tensors[1][:, 1:] & Mark.NO_LOSS.value == 0).float()
    documents = None
    if packing is not None:
        assert Mark.LAST in batch.marks, "nothing has marked the ends of documents"
        last_BS = tensors[1][:, :-1] & Mark.LAST.value != 0
        documents = packing.documents(last_BS, _most_documents(batch.samples))
    return DeviceBatch(ids_BT[:, :-1], ids_BT[:, 1:], weights_BS, batch.position, documents)


def _most_documents(samples: Samples | None) -> int | None:
    """Upper bound of the number of documents in the inputs; None if another rank reads the
    samples."""
    if samples is None or samples.marks is None:
        return None
    return len(samples.marks) + int(np.count_nonzero(samples.marks & Mark.LAST.value))
