"""Worker processes: order, backpressure, errors, and termination."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_ds.config.problems import UserError
from megatron_ds.preprocess.worker_pool import MAX_IN_FLIGHT_PER_WORKER, Workers
from tests.problems import codes, raises_problem

REPOSITORY = Path(__file__).resolve().parents[2]


def square(number: int) -> int:
    if number == 13:
        raise ValueError("thirteen")
    if number == 99:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


def big(number: int) -> bytes:
    return bytes([number]) * (1 << 20)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_results_are_in_order(count: int) -> None:
    with Workers(square, count) as workers:
        assert list(workers.map(range(10))) == [n * n for n in range(10)]
    assert multiprocessing.active_children() == []


def test_large_items_in_both_directions_do_not_block() -> None:
    with Workers(len, 2) as lengths:
        assert list(lengths.map([b"x" * (1 << 20)] * 8)) == [1 << 20] * 8
    with Workers(big, 2) as workers:
        assert [result[0] for result in workers.map(range(8))] == list(range(8))


def test_items_are_read_on_demand() -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(100, 1000):
            taken.append(number)
            yield number

    with Workers(square, 2) as workers:
        results = workers.map(items())
        assert next(results) == 10000
        assert len(taken) == 2 * MAX_IN_FLIGHT_PER_WORKER
        assert list(workers.finish_pending()) == [n * n for n in taken[1:]]


def test_exception_reaches_the_caller() -> None:
    def run() -> None:
        with Workers(square, 2) as workers:
            list(workers.map(range(20)))

    with pytest.raises(ValueError, match="thirteen"):
        run()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("count", [1, 3])
def test_killed_worker_raises(count: int) -> None:
    def run() -> None:
        with Workers(square, count) as workers:
            list(workers.map([1, 2, 99, 4, 5]))

    with raises_problem("worker-process-lost"):
        run()
    assert multiprocessing.active_children() == []


def test_a_broken_pipe_leaves_no_view_of_a_buffer() -> None:
    """Python before 3.12.2 crashes when it collects one that is part of a cycle."""

    def run() -> None:
        with Workers(len, 1) as workers:
            workers._processes[0].kill()
            workers._processes[0].join()
            list(workers.map([b"x" * (1 << 20)] * 5))

    def views() -> list[memoryview]:
        return [each for each in gc.get_objects() if type(each) is memoryview]

    before = views()  # kept, so that a new one cannot have the id of an old one
    old = set(map(id, before))
    with pytest.raises(UserError) as raised:
        run()
    new = [each for each in views() if id(each) not in old]
    assert [each for each in new if not isinstance(each.obj, bytes)] == []
    assert codes(raised.value.problems) == ["worker-process-lost"]


def test_workers_exit_when_the_parent_is_killed() -> None:
    code = (
        "import os, signal\n"
        "from megatron_ds.preprocess.worker_pool import Workers\n"
        "workers = Workers(abs, 3).__enter__()\n"
        "print(*[p.pid for p in workers._processes], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False
    )
    # The pipe of stdout closes when the last worker, which inherits it, has exited.
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], 10)
    assert alive == []


def test_interrupt_during_fork_is_not_lost() -> None:
    """Python prints and ignores exceptions that are raised in its hooks after a fork."""
    armed = [True]

    def interrupt() -> None:
        while armed:
            armed.pop()
            os.kill(os.getpid(), signal.SIGINT)

    os.register_at_fork(after_in_parent=interrupt)  # cannot be unregistered: acts once
    with pytest.raises(KeyboardInterrupt), Workers(str, 1):
        pass
    for child in multiprocessing.active_children():
        child.terminate()
        child.join()


def test_an_interrupt_at_any_step_ends_the_workers() -> None:
    """Locks that Ctrl-C leaves acquired would make the exit wait indefinitely."""
    code = (
        "import sys\n"
        "from megatron_ds.preprocess.worker_pool import Workers\n"
        "def interrupt_at(step):\n"
        "    def trace(*event):\n"
        "        nonlocal step\n"
        "        step -= 1\n"
        "        if step == 0:\n"
        "            raise KeyboardInterrupt\n"
        "        return trace\n"
        "    return trace\n"
        "step, done = 0, False\n"
        "while not done:\n"
        "    step += 1\n"
        "    try:\n"
        "        with Workers(abs, 1) as workers:\n"
        "            sys.settrace(interrupt_at(step))\n"
        "            done = list(workers.map(range(5))) == [0, 1, 2, 3, 4]\n"
        "    except KeyboardInterrupt:\n"
        "        pass\n"
        "    sys.settrace(None)\n"
        "print(step)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    # Python prints and ignores an interrupt in a callback of its own.
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
