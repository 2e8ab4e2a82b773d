"""The data order depends on seed and consumed samples only, not on layout, workers or resumes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time

import numpy as np
import numpy.typing as npt
import pytest

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data import loader_process as module
from megatron_ds.data.micro_batches import Batch, MicroBatchIterator
from megatron_ds.data.sample import IdArray, Mark, MarkArray
from megatron_ds.data.token_dataset import TokenDataset
from tests.problems import raises_problem

SEQUENCE = 3


class CountingDataset(TokenDataset):
    """Sample i consists of i, i + 1, ...: its first token is its id."""

    seq_length = SEQUENCE
    vocab_size = None
    cache = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> npt.NDArray[np.int32]:
        assert 0 <= position < self._size
        return np.arange(position, position + SEQUENCE + 1, dtype=np.int32)

    def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        ids[:] = self[position]

    def sample_id(self, position: int) -> str:
        return str(position)


def make_iterator(
    size: int, dataset: CountingDataset | None = None, **values: int | None
) -> MicroBatchIterator:
    settings: dict[str, int | None] = {"consumed": 0, "micro_batch_size": 1, "dp_rank": 0}
    dataset = dataset or CountingDataset(size)
    return MicroBatchIterator(dataset, **{**settings, "dp_size": 1, **values})


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
            ids += batch.samples.ids[:, 0].tolist()
        for rank in ranks:
            rank.close()
    return ids


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4])
def test_order_is_independent_of_layout_and_resumes(dp_size: int, micro: int) -> None:
    """Claim (samples): the data order does not depend on the layout or the number of resumes"""
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
        assert batch.samples.ids.tolist() == [[4, 5, 6, 7], [5, 6, 7, 8]]
        assert batch.samples.marks is None
        assert batch[1:] == ((2, 4), 4, 0)


class MarkedDataset(CountingDataset):
    """Even tokens have no loss, and every third one is the last of its document."""

    marks = Mark.NO_LOSS | Mark.LAST

    def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        super().read_into(position, ids)
        assert marks is not None
        assert not marks.any()
        marks[ids % 2 == 0] |= Mark.NO_LOSS.value
        marks[ids % 3 == 0] |= Mark.LAST.value


@pytest.mark.parametrize("workers", [0, 2])
def test_marks_come_with_their_tokens(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Also where the memory of a loader process is used again."""
    monkeypatch.setattr(module, "TOKENS_AHEAD", 2 * 2 * (SEQUENCE + 1))
    batches = make_iterator(40, MarkedDataset(40), micro_batch_size=2, num_workers=workers)
    for batch in batches:
        ids, marks = batch.samples
        assert batch.marks == Mark.NO_LOSS | Mark.LAST
        assert marks.dtype == np.uint8
        assert np.array_equal(marks & Mark.NO_LOSS.value != 0, ids % 2 == 0)
        assert np.array_equal(marks & Mark.LAST.value != 0, ids % 3 == 0)


def test_a_rank_that_does_not_read_gets_positions() -> None:
    read = list(make_iterator(9, micro_batch_size=2))
    batches = make_iterator(9, micro_batch_size=2, reads=False, num_workers=2)
    first = next(batches)
    assert multiprocessing.active_children() == []  # nor does it start loader processes
    assert [batch._replace(samples=None) for batch in read] == [first, *batches]


@pytest.mark.parametrize("slots", [0, 2, 3, 5])
def test_size_of_the_shared_memory_does_not_change_batches(
    monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    monkeypatch.setattr(module, "TOKENS_AHEAD", slots * 2 * (SEQUENCE + 1))
    direct, sent = (list(make_iterator(40, micro_batch_size=2, num_workers=n)) for n in (0, 2))
    assert [batch.position for batch in sent] == [batch.position for batch in direct]
    assert len(direct) > 5
    for one, other in zip(direct, sent, strict=True):
        assert np.array_equal(one.samples.ids, other.samples.ids)


def test_loader_process_reads_ahead_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first micro-batch is there as soon as it is read; two are read ahead however long."""
    allowed = multiprocessing.Semaphore(1)
    read = multiprocessing.Value("i", 0)

    class SlowDataset(CountingDataset):
        def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
            allowed.acquire()
            super().read_into(position, ids, marks)
            read.value = position + 1

    monkeypatch.setattr(module, "TOKENS_AHEAD", 1)
    batches = make_iterator(50, num_workers=1, dataset=SlowDataset(50))
    assert next(batches).position == 0
    for _ in range(20):
        allowed.release()
    assert next(batches).position == 1
    deadline = time.monotonic() + 10
    while read.value < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert read.value == 4
    batches.close()


class DamagedDataset(CountingDataset):
    """Raises an error at one position."""

    def __init__(self, size: int, position: int, error: BaseException) -> None:
        super().__init__(size)
        self._position = position
        self._error = error

    def read_into(self, position: int, ids: IdArray, marks: MarkArray | None = None) -> None:
        if position == self._position:
            raise self._error
        super().read_into(position, ids, marks)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_data_error_reaches_the_trainer_unchanged_and_in_order(workers: int) -> None:
    error = UserError(Problem.of("some-code", f"p.bin: {'damaged ' * 1000}"))
    batches = make_iterator(9, dataset=DamagedDataset(9, 5, error), num_workers=workers)
    assert [next(batches).position for _ in range(5)] == list(range(5))
    with raises_problem("some-code", contains="p.bin: damaged damaged"):
        next(batches)
    assert multiprocessing.active_children() == []


def test_other_errors_of_a_loader_process_come_with_their_traceback() -> None:
    dataset = DamagedDataset(9, 1, ZeroDivisionError("of a test"))
    batches = make_iterator(9, dataset=dataset, num_workers=1)
    next(batches)
    with pytest.raises(RuntimeError, match=r"in read_into(.|\n)*ZeroDivisionError: of a test"):
        next(batches)


def test_killed_loader_process_is_an_error() -> None:
    batches = make_iterator(10_000, num_workers=1)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=rf"\(pid {worker.pid}\) was killed by signal 9"):
        list(batches)


def test_close_ends_the_loader_processes() -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    batches = make_iterator(10_000, num_workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert len(os.listdir("/proc/self/fd")) == open_files
    assert (multiprocessing.active_children(), list(batches)) == ([], [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_loader_process_ignores_signals(number: signal.Signals) -> None:
    """Launchers and terminals signal the whole process group, but the step must be finished."""
    batches = make_iterator(1000, num_workers=1)
    first = next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, number)
    rest = [batch.position for batch in batches]
    batches.close()
    assert [first.position, *rest] == list(range(1000))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the death of a parent")
def test_loader_process_is_killed_with_its_parent() -> None:
    """Immediately, not at its next check for the parent."""
    loader = multiprocessing.get_context("fork").Process(target=_exit_with_parent_death_signal)
    loader.start()
    loader.join()
    assert loader.exitcode == int(signal.SIGKILL)


def _exit_with_parent_death_signal() -> None:
    module.die_with_parent()
    number = ctypes.c_int()
    get_pdeathsig = 2
    ctypes.CDLL(None).prctl(get_pdeathsig, ctypes.byref(number))
    os._exit(number.value)
