"""The data order depends on seed and consumed samples only, not on layout, workers or resumes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data import micro_batches as module
from megatron_ds.data.micro_batches import Batch, MicroBatchIterator
from tests.problems import raises_problem

SEQUENCE = 3


class CountingDataset:
    """Sample i consists of i, i + 1, ...: its first token is its id."""

    seq_length = SEQUENCE
    vocab_size = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
        assert 0 <= position < self._size
        return np.arange(position, position + SEQUENCE + 1)

    def read_into(self, position: int, row: npt.NDArray[np.int64]) -> None:
        row[:] = self[position]

    def sample_id(self, position: int) -> str:
        return str(position)


def make_iterator(size: int, **values: int | None) -> MicroBatchIterator:
    settings: dict[str, int | None] = {"consumed": 0, "micro_batch_size": 1, "dp_rank": 0}
    return MicroBatchIterator(CountingDataset(size), **{**settings, "dp_size": 1, **values})  # type: ignore


def consumed_ids(runs: list[tuple[int, int, int]], size: int, workers: int = 0) -> list[int]:
    """Sample ids in the order in which all ranks consume them.

    runs: data-parallel size, micro-batch size and micro-steps of runs that resume one another.
    """
    ids: list[int] = []
    for dp_size, micro, steps in runs:
        layout = {"micro_batch_size": micro, "dp_size": dp_size, "num_workers": workers}
        ranks = [
            make_iterator(size, consumed=len(ids), dp_rank=rank, **layout)
            for rank in range(dp_size)
        ]
        for rank in ranks * steps:
            batch = next(rank)
            assert batch.position == len(ids)
            ids += batch.tokens_BS[:, 0].tolist()
        for rank in ranks:
            rank.close()
    return ids


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_order_is_independent_of_layout_and_resumes(dp_size: int, micro: int) -> None:
    steps = 48 // (dp_size * micro)
    for runs in ([steps], [1, steps - 1], [1, 1, steps - 2], [steps - 1, 0, 1]):
        assert consumed_ids([(dp_size, micro, n) for n in runs], 50) == list(range(48))


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 1), (2, 4), (4, 2)])
def test_order_is_independent_of_workers(dp_size: int, micro: int) -> None:
    steps = 16 // (dp_size * micro)
    runs = [(dp_size, micro, n) for n in (1, steps - 1)]
    assert consumed_ids(runs, 17, workers=2) == list(range(16))


def test_resume_on_another_layout_leaves_no_gap() -> None:
    assert consumed_ids([(2, 1, 3), (1, 4, 2), (4, 2, 1)], 99) == list(range(22))


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_stop_at_the_same_step(workers: int) -> None:
    values = {"consumed": 3, "micro_batch_size": 2, "dp_size": 2, "num_workers": workers}
    for rank in range(2):
        batches = make_iterator(3 + 4 * 2 + 3, dp_rank=rank, **values)
        assert (len(batches), len(list(batches))) == (2, 2)
    assert len(make_iterator(5, consumed=9)) == 0


def get_batch(**values: int | None) -> Batch:
    return next(make_iterator(20, micro_batch_size=2, consumed=4, **values))


def test_batch_content() -> None:
    for workers in (0, 1):
        batch = get_batch(num_workers=workers)
        assert batch.tokens_BS.tolist() == [[4, 5, 6], [5, 6, 7]]
        assert batch.labels_BS.tolist() == [[5, 6, 7], [6, 7, 8]]
        assert (batch.loss_mask_BS.tolist(), batch.position) == ([[1, 1, 1], [1, 1, 1]], 4)
        assert [t.dtype for t in batch[:3]] == [torch.int64, torch.int64, torch.float32]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_message_size_does_not_change_batches(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "SAMPLES_PER_MESSAGE", size)
    direct, sent = (list(make_iterator(40, micro_batch_size=2, num_workers=n)) for n in (0, 1))
    assert [batch.position for batch in sent] == [batch.position for batch in direct]
    assert len(direct) > 5
    for one, other in zip(direct, sent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


@pytest.mark.parametrize("largest", [0, 255, 256, 65_535, 65_536, 2**31, 2**32, 2**40])
@pytest.mark.parametrize("smallest", [0, -1])
def test_ids_survive_narrowing(largest: int, smallest: int) -> None:
    rows = np.array([[smallest, largest, 1]])
    sent = module._narrow_dtype(rows)
    assert isinstance(sent, np.ndarray)
    assert module.collate(sent, 0, None).tokens_BS.tolist() == [[smallest, largest]]
    assert smallest or sent.itemsize <= max(1, (largest.bit_length() + 7) // 8 * 2 - 1)


def test_batch_is_truncated() -> None:
    batch = next(make_iterator(8, micro_batch_size=2))
    length = batch.tokens_BS.shape[1]
    truncated = batch.truncated(length - 1)
    assert truncated.position == batch.position
    for full, part in zip(batch, truncated, strict=True):
        if isinstance(full, torch.Tensor):
            assert isinstance(part, torch.Tensor)
            assert torch.equal(part, full[:, : length - 1])
    assert batch.truncated(length) is batch
    assert batch.truncated(length + 1) is batch


def test_eod_has_no_loss() -> None:
    assert get_batch(eod=6).loss_mask_BS.tolist() == [[1, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_does_not_advance_torchs_generator(workers: int) -> None:
    before = torch.get_rng_state()
    get_batch(num_workers=workers)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_data_error_reaches_the_trainer_unchanged(workers: int) -> None:
    class DamagedDataset(CountingDataset):
        def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
            raise UserError(Problem.of("some-code", "p.bin: is damaged"))

    batches = MicroBatchIterator(
        DamagedDataset(5), consumed=0, micro_batch_size=1, dp_rank=0, dp_size=1, num_workers=workers
    )
    with raises_problem("some-code", contains="p.bin"):
        next(batches)
    batches.close()


def test_close_ends_the_loader_processes() -> None:
    batches = make_iterator(50, num_workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert (multiprocessing.active_children(), list(batches)) == ([], [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_loader_process_ignores_signals(number: signal.Signals) -> None:
    """Launchers and terminals signal the whole process group, but the step must be finished."""
    batches = make_iterator(64, num_workers=1)
    first = next(batches)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, number)
    rest = [batch.position for batch in batches]
    batches.close()
    assert [first.position, *rest] == list(range(64))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_loader_process_is_killed_with_its_parent() -> None:
    """Immediately, not at its next check for the parent."""
    loader = multiprocessing.get_context("fork").Process(target=_exit_with_parent_death_signal)
    loader.start()
    loader.join()
    assert loader.exitcode == int(signal.SIGKILL)


def _exit_with_parent_death_signal() -> None:
    module._die_with_parent(0)
    number = ctypes.c_int()
    get_pdeathsig = 2
    ctypes.CDLL(None).prctl(get_pdeathsig, ctypes.byref(number))
    os._exit(number.value)
