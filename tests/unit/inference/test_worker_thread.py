"""Calls in threads: one that is given up costs no other call, and its thread ends with it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from megatron_ds.inference.serving import worker_thread
from megatron_ds.inference.serving.worker_thread import WorkerThread
from tests.unit.inference.schedulers import DEADLINE, wait_until

EARLIER = set[threading.Thread]()
"""Threads of servers of other tests, which may wait for calls for a while."""


@pytest.fixture(autouse=True)
def _threads_end_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "IDLE_S", 0.0)
    EARLIER.clear()
    EARLIER.update(threading.enumerate())


def threads() -> int:
    """Threads that a test has started for calls."""
    return sum(
        thread.name == "reader" and thread not in EARLIER for thread in threading.enumerate()
    )


def run(main: Callable[[WorkerThread], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main(WorkerThread()))
    wait_until(lambda: threads() == 0)


async def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def loop_until(released: threading.Event, result: str) -> str:
    """Python code, which an exception from outside could reach at any time."""
    while not released.is_set():
        pass
    return result


def test_a_thread_waits_for_further_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "IDLE_S", 0.5)

    async def main(worker: WorkerThread) -> None:
        thread = await worker.call(DEADLINE, threading.get_ident)
        for _ in range(3):
            await wait_for(lambda: worker._is_thread_free)
            assert await worker.call(DEADLINE, threading.get_ident) == thread
            assert threads() == 1
        await wait_for(lambda: threads() == 0)
        assert await worker.call(DEADLINE, str, 3) == "3"

    run(main)


def test_of_threads_without_calls_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "IDLE_S", 0.5)
    monkeypatch.setattr(worker_thread, "TURN_S", 0.01)

    async def main(worker: WorkerThread) -> None:
        released = threading.Event()
        calls = [
            asyncio.ensure_future(worker.call(DEADLINE, loop_until, released, "x"))
            for _ in range(3)
        ]
        await wait_for(lambda: threads() == 3)
        released.set()
        assert await asyncio.gather(*calls) == ["x", "x", "x"]
        await wait_for(lambda: threads() == 1)

    run(main)


def test_no_call_is_lost_while_a_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls arrive about when the thread's time is over."""
    monkeypatch.setattr(worker_thread, "IDLE_S", 0.001)

    async def main(worker: WorkerThread) -> None:
        for number in range(300):
            assert await worker.call(DEADLINE, str, number) == str(number)
            await asyncio.sleep(0.0005 + number * 0.000005)

    run(main)


@pytest.mark.parametrize("is_late", [True, False], ids=["its time is over", "its task ends"])
def test_a_call_that_is_given_up_costs_no_other_call(is_late: bool) -> None:
    """Claim (serving): a request that is given up, because its client leaves or its time is over,
    neither interrupts nor delays another one"""

    async def main(worker: WorkerThread) -> None:
        first = threading.Event()
        second = threading.Event()
        for _ in range(3):
            late = 0.5 if is_late else DEADLINE
            given_up = asyncio.ensure_future(worker.call(late, loop_until, first, "late"))
            await wait_for(lambda: threads() > 0)
            other = asyncio.ensure_future(worker.call(DEADLINE, loop_until, second, "other"))
            if not is_late:
                given_up.cancel()
            with pytest.raises(TimeoutError if is_late else asyncio.CancelledError):
                await given_up
            await wait_for(lambda: threads() == 2)
            second.set()
            assert await other == "other"
            assert await worker.call(DEADLINE, str, 5) == "5"
            first.set()
            await wait_for(lambda: threads() == 0)
            assert await worker.call(DEADLINE, str, 6) == "6"
            await wait_for(lambda: threads() == 0)
            first.clear()
            second.clear()

    run(main)


def test_a_call_that_has_not_started_never_runs() -> None:
    async def main(worker: WorkerThread) -> None:
        released = threading.Event()
        called = list[int]()
        running = asyncio.ensure_future(worker.call(DEADLINE, loop_until, released, "x"))
        await wait_for(lambda: threads() == 1)
        with pytest.raises(TimeoutError):
            await worker.call(0.01, called.append, 1)
        released.set()
        assert await running == "x"
        assert await worker.call(DEADLINE, called.append, 2) is None
        assert called == [2]

    run(main)


def test_a_long_call_does_not_delay_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "TURN_S", 0.01)

    async def main(worker: WorkerThread) -> None:
        released = threading.Event()
        running = asyncio.ensure_future(worker.call(DEADLINE, loop_until, released, "long"))
        assert [await worker.call(DEADLINE, str, number) for number in (1, 2)] == ["1", "2"]
        assert not running.done()
        released.set()
        assert await running == "long"

    run(main)


def test_threads_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_thread, "MAX_THREADS", 3)

    async def main(worker: WorkerThread) -> None:
        released = threading.Event()
        for count in range(1, 5):
            with pytest.raises(TimeoutError):
                await worker.call(0.5, loop_until, released, "x")
            assert threads() == min(count, 3)
            assert worker.is_stuck == (count >= 3)
        waiting = asyncio.ensure_future(worker.call(DEADLINE, str, 7))
        released.set()
        assert await waiting == "7"
        assert not worker.is_stuck

    run(main)


class Panic(BaseException):
    """As Rust code raises it."""


ERRORS = [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), StopIteration(1), Panic("broken")]


@pytest.mark.parametrize("error", [*ERRORS, asyncio.CancelledError()], ids=repr)
def test_exceptions_that_are_no_errors_are_converted(error: BaseException) -> None:
    def fail(raised: BaseException) -> None:
        raise raised

    async def main(worker: WorkerThread) -> None:
        with pytest.raises(RuntimeError, match=type(error).__name__) as converted:
            await worker.call(DEADLINE, fail, error)
        assert converted.value.__cause__ is error
        with pytest.raises(ZeroDivisionError):
            await worker.call(DEADLINE, fail, ZeroDivisionError())
        assert await worker.call(DEADLINE, str, 8) == "8"

    run(main)


def test_threads_that_cannot_be_started_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def main(worker: WorkerThread) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(worker_thread.MAX_THREADS + 1):
                with pytest.raises(RuntimeError, match="new thread"):
                    await worker.call(DEADLINE, str, 1)
        assert await worker.call(DEADLINE, str, 9) == "9"

    run(main)
