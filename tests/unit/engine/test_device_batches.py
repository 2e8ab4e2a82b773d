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
from megatron_ds.engine.device_batches import DeviceBatches
from megatron_ds.parallel.mesh import Mesh
from tests.problems import raises_problem
from tests.tables import tables

TABLES = tables(__file__)

CPU = torch.device("cpu")


class Streams:
    """An accelerator whose streams and events log what they are asked, on the CPU."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.pinned: list[torch.Tensor] = []
        self.current = "compute"

    class _Event:
        def __init__(self, log: list[str]) -> None:
            self.log, self.number = log, -1

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
    accelerator, to = Streams(), torch.Tensor.to

    def copy(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if any(self is buffer for buffer in accelerator.pinned):
            assert options == {"non_blocking": True}
            accelerator.log.append(f"copy on {accelerator.current}")
            return self.clone()
        return to(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "to", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: accelerator.log.append("kept"))
    return accelerator


def host_batches(count: int, log: list[str], eod: int | None = None) -> Iterator[Batch]:
    for number in range(count):
        log.append(f"read {number}")
        rows = np.arange(8, dtype=np.int32).reshape(2, 4) + 10 * number
        yield Batch(rows, rows.shape, 2 * number, eod)


def test_inputs_labels_and_mask_are_made_of_one_array() -> None:
    batches = DeviceBatches(host_batches(2, [], eod=5), CPU, Mesh.single().tp)
    batch = next(batches)
    assert batch.tokens_BS.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert batch.labels_BS.tolist() == [[1, 2, 3], [5, 6, 7]]
    assert batch.loss_mask_BS.tolist() == [[1, 1, 1], [1, 0, 1]]
    assert [t.dtype for t in batch[:3]] == [torch.int64, torch.int64, torch.float32]
    assert batch.num_counted() == 5
    short = batch.truncated(2)
    assert [t.tolist() for t in short[:3]] == [[[0, 1], [4, 5]], [[1, 2], [5, 6]], [[1, 1], [1, 0]]]
    assert batch.truncated(3) is batch
    assert next(batches).loss_mask_BS.tolist() == [[1, 1, 1], [1, 1, 1]]
    with pytest.raises(StopIteration):
        next(batches)


def test_documents_are_counted_on_the_host() -> None:
    batches = DeviceBatches(host_batches(1, []), CPU, Mesh.single().tp, document_end=5)
    batch = next(batches)
    assert batch.max_documents == 3
    assert batch.truncated(2).max_documents == 3


def test_without_an_end_of_document_every_token_counts() -> None:
    batch = next(DeviceBatches(host_batches(1, []), CPU, Mesh.single().tp))
    assert batch.loss_mask_BS is None
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
    assert streams.log == TABLES["copies"]
    assert len(streams.pinned) == 2


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
