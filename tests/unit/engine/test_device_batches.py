"""Copies of micro-batches to the device: content, order, and reuse of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.micro_batches import Batch
from megatron_ds.data.sample import NO_MARKS, Mark, Samples
from megatron_ds.engine.device_batches import DeviceBatches
from megatron_ds.model.attention.packed import PackingOptions
from megatron_ds.parallel.mesh import Mesh
from tests.problems import raises_problem

CPU = torch.device("cpu")


class Streams:
    """An accelerator whose streams and events log what they are asked, on the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: list[torch.Tensor] = []
        self.current = "compute"

    class _Event:
        def __init__(self, log: list[str]) -> None:
            self.log = log
            self.number = -1

        def record(self, stream: Any) -> None:
            self.number = sum(entry.startswith("copied") for entry in self.log)
            self.log.append(f"copied {self.number} on {stream}")

        def synchronize(self) -> None:
            self.log.append(f"host waits for copy {self.number}")

    class _Compute:
        def __init__(self, log: list[str]) -> None:
            self.log = log

        def wait_event(self, event: Any) -> None:
            self.log.append(f"compute waits for copy {event.number}")

    def Stream(self) -> str:
        return "side"

    def Event(self) -> _Event:
        return self._Event(self.log)

    def current_stream(self) -> _Compute:
        return self._Compute(self.log)

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.current = stream
        yield
        self.current = "compute"

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.append(tensor)
        return tensor


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    accelerator = Streams()
    to = torch.Tensor.to

    def copy(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if any(self is buffer for buffer in accelerator.pinned):
            assert options == {"non_blocking": True}
            accelerator.log.append(f"copy on {accelerator.current}")
            return self.clone()
        return to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: accelerator.log.append("kept"))
    return accelerator


NO_LOSS = Mark.NO_LOSS
LAST = Mark.LAST


def host_batches(count: int, log: list[str], marks: Mark = NO_MARKS) -> Iterator[Batch]:
    """Batches of the tokens 0, 1, ...; 2 has no loss, and 5 is the last of its document."""
    for number in range(count):
        log.append(f"read {number}")
        ids = np.arange(8, dtype=np.int32).reshape(2, 4) + 10 * number
        bits = ((ids == 2) * NO_LOSS.value + (ids == 5) * LAST.value).astype(np.uint8)
        yield Batch(Samples(ids, bits if marks else None), ids.shape, 2 * number, marks)


def test_inputs_labels_and_weights_are_made_of_ids_and_marks() -> None:
    batches = DeviceBatches(host_batches(2, [], NO_LOSS), CPU, Mesh.single().tp)
    batch = next(batches)
    assert batch.tokens_BS.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert batch.labels_BS.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch.loss_weights_BS.tolist() == [[1, 0, 1], [1, 1, 1]]
    assert [t.dtype for t in batch[:3]] == [torch.int64, torch.int64, torch.float32]
    assert batch.documents is None
    assert batch.num_counted() == 5
    short = batch.truncated(2)
    assert [t.tolist() for t in short[:3]] == [[[0, 1], [4, 5]], [[1, 2], [5, 6]], [[1, 0], [1, 1]]]
    assert batch.truncated(3) is batch
    assert next(batches).loss_weights_BS.tolist() == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(StopIteration):
        next(batches)


def test_documents_are_found_once_and_counted_on_the_host() -> None:
    packing = PackingOptions(reset_positions=True, reset_attention=False)
    batches = DeviceBatches(host_batches(1, [], LAST), CPU, Mesh.single().tp, packing=packing)
    batch = next(batches)
    assert batch.loss_weights_BS is None
    for each, length in ((batch, 3), (batch.truncated(2), 2)):
        documents = each.documents
        assert documents is not None
        assert documents.max_documents == 3
        assert documents.last_BS.tolist() == [[False] * length, [False, True, False][:length]]
        assert documents.doc_ids_BS.tolist() == [[0, 0, 0][:length], [0, 0, 1][:length]]
        assert documents.doc_positions_BS.tolist() == [[0, 1, 2][:length], [0, 1, 0][:length]]
        assert documents.positions_BS is documents.doc_positions_BS
        assert documents.attended_BS is None


def test_the_last_label_may_end_a_document() -> None:
    """It is counted, but is no input."""
    ids = np.array([[1, 2, 3]], dtype=np.int32)
    marks = np.array([[0, 0, LAST]], dtype=np.uint8)
    batches = iter([Batch(Samples(ids, marks), ids.shape, 0, LAST)])
    packing = PackingOptions(reset_positions=True, reset_attention=True)
    documents = next(DeviceBatches(batches, CPU, Mesh.single().tp, packing=packing)).documents
    assert documents is not None
    assert documents.attended_BS is documents.doc_ids_BS
    assert documents.doc_ids_BS.tolist() == [[0, 0]]
    assert documents.max_documents == 2


def test_without_marks_every_token_counts() -> None:
    batch = next(DeviceBatches(host_batches(1, []), CPU, Mesh.single().tp))
    assert batch.loss_weights_BS is None
    assert batch.num_counted() == 6
    assert batch.truncated(1).num_counted() == 2


def test_each_copy_starts_one_batch_ahead(streams: Streams) -> None:
    """Claim (precision): micro-batches are copied to the device one ahead"""
    batches = DeviceBatches(host_batches(4, streams.log), CPU, Mesh.single().tp, streams)
    found = []
    for batch in batches:
        found.append(int(batch.tokens_BS[0, 0]))
        streams.log.append(f"computed {batch.position // 2}")
    assert found == [0, 10, 20, 30]
    assert streams.log == [
        "read 0",
        "copy on side",
        "copied 0 on side",
        "compute waits for copy 0",
        "kept",
        "read 1",
        "copy on side",
        "copied 1 on side",
        "computed 0",
        "compute waits for copy 1",
        "kept",
        "read 2",
        "host waits for copy 0",
        "copy on side",
        "copied 2 on side",
        "computed 1",
        "compute waits for copy 2",
        "kept",
        "read 3",
        "host waits for copy 1",
        "copy on side",
        "copied 3 on side",
        "computed 2",
        "compute waits for copy 3",
        "kept",
        "computed 3",
    ]
    assert len(streams.pinned) == 2


def test_marks_are_copied_with_their_ids(streams: Streams) -> None:
    batches = DeviceBatches(host_batches(3, [], NO_LOSS), CPU, Mesh.single().tp, streams)
    counted = [int(batch.num_counted()) for batch in batches]
    assert counted == [5, 6, 6]
    assert [tensor.dtype for tensor in streams.pinned] == [torch.int32, torch.uint8] * 2
    assert sum(entry.startswith("copied") for entry in streams.log) == 3  # an event for both


def test_an_error_of_the_next_batch_is_raised_when_it_is_due(streams: Streams) -> None:
    def damaged() -> Iterator[Batch]:
        yield from host_batches(1, [])
        raise UserError(Problem.of("some-code", "p.bin: is damaged"))

    batches = DeviceBatches(damaged(), CPU, Mesh.single().tp, streams)
    assert next(batches).position == 0
    with raises_problem("some-code"):
        next(batches)


def test_closing_ends_the_iteration(streams: Streams) -> None:
    host = host_batches(3, [])
    batches = DeviceBatches(host, CPU, Mesh.single().tp, streams)
    next(batches)
    batches.close()
    assert list(batches) == list(host) == []
