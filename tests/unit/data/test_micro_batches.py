"""Data order: a function of seed and consumed samples alone, for any layout, workers and
resumes."""

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

from megatron_ds.data import micro_batches as module
from megatron_ds.data.micro_batches import Batch, MicroBatchIterator

SEQUENCE = 3


class Numbers:
    """Sample i is i, i + 1, ...: its first token is its id."""

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


def stream(size: int, **values: int | None) -> MicroBatchIterator:
    settings: dict[str, int | None] = {"consumed": 0, "micro_batch_size": 1, "dp_rank": 0}
    return MicroBatchIterator(Numbers(size), **{**settings, "dp_size": 1, **values})  # type: ignore


def consumed_ids(
    dp_size: int, micro: int, workers: int, resumes: list[int], steps: int, size: int
) -> list[int]:
    """Sample ids in the order in which all ranks together use them, over several runs.

    resumes: micro-steps after which a run stops and the next begins.
    """
    ids: list[int] = []
    for end in [*resumes, steps]:
        ranks = [
            stream(
                size,
                consumed=len(ids),
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=dp_size,
                num_workers=workers,
            )
            for rank in range(dp_size)
        ]
        while len(ids) < end * dp_size * micro:
            for rank in ranks:
                batch = next(rank)
                assert batch.position == len(ids)
                ids += batch.tokens_BS[:, 0].tolist()
        for rank in ranks:
            rank.close()
    return ids


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_order_is_the_same_for_any_layout_and_resumes(dp_size: int, micro: int) -> None:
    steps = 48 // (dp_size * micro)
    for resumes in ([], [1], [1, 2], [steps - 1, steps - 1]):
        assert consumed_ids(dp_size, micro, 0, resumes, steps, 50) == list(range(48))


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 1), (2, 4), (4, 2)])
def test_workers_do_not_change_the_order(dp_size: int, micro: int) -> None:
    steps = 16 // (dp_size * micro)
    assert consumed_ids(dp_size, micro, 2, [1], steps, 17) == list(range(16))


def test_a_change_of_layout_between_runs_leaves_no_gap() -> None:
    ids: list[int] = []
    for dp_size, micro, steps in ((2, 1, 3), (1, 4, 2), (4, 2, 1)):
        ranks = [
            stream(99, consumed=len(ids), micro_batch_size=micro, dp_rank=rank, dp_size=dp_size)
            for rank in range(dp_size)
        ]
        for _ in range(steps):
            for rank in ranks:
                ids += next(rank).tokens_BS[:, 0].tolist()
    assert ids == list(range(22))


@pytest.mark.parametrize("workers", [0, 2])
def test_all_ranks_end_at_the_same_step(workers: int) -> None:
    values = {"consumed": 3, "micro_batch_size": 2, "dp_size": 2, "num_workers": workers}
    for rank in range(2):
        batches = stream(3 + 4 * 2 + 3, dp_rank=rank, **values)
        assert len(batches) == 2
        assert len(list(batches)) == 2
    assert len(stream(5, consumed=9)) == 0


def batch_of(**values: int | None) -> Batch:
    return next(stream(20, micro_batch_size=2, consumed=4, **values))


def test_a_batch() -> None:
    for workers in (0, 1):
        batch = batch_of(num_workers=workers)
        assert batch.tokens_BS.tolist() == [[4, 5, 6], [5, 6, 7]]
        assert batch.labels_BS.tolist() == [[5, 6, 7], [6, 7, 8]]
        assert batch.loss_mask_BS.tolist() == [[1, 1, 1], [1, 1, 1]]
        assert batch.position == 4
        assert [t.dtype for t in batch[:3]] == [torch.int64, torch.int64, torch.float32]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_is_sent_together_is_what_is_read_one_by_one(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(module, "SAMPLES_PER_MESSAGE", size)
    alone, sent = (list(stream(40, micro_batch_size=2, num_workers=n)) for n in (0, 1))
    assert [batch.position for batch in sent] == [batch.position for batch in alone]
    assert len(alone) > 5
    for one, other in zip(alone, sent, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


@pytest.mark.parametrize("largest", [0, 255, 256, 65_535, 65_536, 2**31, 2**32, 2**40])
@pytest.mark.parametrize("smallest", [0, -1])
def test_any_ids_are_sent_as_they_are(largest: int, smallest: int) -> None:
    rows = np.array([[smallest, largest, 1]])
    sent = module._narrow_dtype(rows)
    assert isinstance(sent, np.ndarray)
    assert module.collate(sent, 0, None).tokens_BS.tolist() == [[smallest, largest]]
    assert smallest or sent.itemsize <= max(1, (largest.bit_length() + 7) // 8 * 2 - 1)


def test_a_batch_is_cut_in_all_its_parts() -> None:
    batch = next(stream(8, micro_batch_size=2))
    length = batch.tokens_BS.shape[1]
    cut = batch.truncated(length - 1)
    assert cut.position == batch.position
    for whole, part in zip(batch, cut, strict=True):
        if isinstance(whole, torch.Tensor):
            assert isinstance(part, torch.Tensor)
            assert torch.equal(part, whole[:, : length - 1])
    assert batch.truncated(length) is batch
    assert batch.truncated(length + 1) is batch


def test_eod_gets_no_loss() -> None:
    assert batch_of(eod=6).loss_mask_BS.tolist() == [[1, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_leaves_torchs_generator_alone(workers: int) -> None:
    before = torch.get_rng_state()
    batch_of(num_workers=workers)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_data_that_is_refused_is_told_in_its_own_words(workers: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
            raise ValueError("p.bin: is damaged")

    batches = MicroBatchIterator(
        Broken(5), consumed=0, micro_batch_size=1, dp_rank=0, dp_size=1, num_workers=workers
    )
    with pytest.raises(ValueError, match=r"^p\.bin: is damaged$"):
        next(batches)
    batches.close()


def test_close_ends_the_workers() -> None:
    batches = stream(50, num_workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert multiprocessing.active_children() == []
    assert list(batches) == []


@pytest.mark.parametrize(
    "values",
    [{"dp_rank": 2, "dp_size": 2}, {"dp_rank": -1}, {"micro_batch_size": 0}, {"consumed": -1}],
)
def test_impossible_layouts_are_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no micro-batches"):
        stream(5, **values)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_loader_outlives_the_signal_that_ends_a_run(number: signal.Signals) -> None:
    """Launchers and terminals signal the whole process group; the trainer still has a step to
    finish."""
    batches = stream(64, num_workers=1)
    first = next(batches)
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, number)
    rest = [batch.position for batch in batches]
    batches.close()
    assert [first.position, *rest] == list(range(64))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_a_loader_dies_with_its_trainer() -> None:
    """At once, and not when it next looks whether the trainer is there."""
    loader = multiprocessing.get_context("fork").Process(target=_tell_the_signal_of_the_parent)
    loader.start()
    loader.join()
    assert loader.exitcode == int(signal.SIGKILL)


def _tell_the_signal_of_the_parent() -> None:
    module._die_with_parent(0)
    number = ctypes.c_int()
    get_pdeathsig = 2
    ctypes.CDLL(None).prctl(get_pdeathsig, ctypes.byref(number))
    os._exit(number.value)
