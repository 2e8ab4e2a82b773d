"""Functions that other threads call, and interrupts of the thread that waits for them."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from megatron_ds.fileio.interruptible_threads import InterruptibleThreads, defer_interrupts


def test_results_and_errors_are_those_of_the_functions() -> None:
    with InterruptibleThreads(2) as threads:
        pending = [threads.submit(lambda number=number: 6 // number) for number in range(4)]
        assert [each.result() for each in pending[1:]] == [6, 3, 2]
        with pytest.raises(ZeroDivisionError):
            pending[0].result()
        assert pending[1].result() == 6
        assert all(each.is_done for each in pending)


def test_the_exit_waits_for_what_was_started_and_drops_the_rest() -> None:
    started = threading.Event()
    go = threading.Event()
    called = []

    def first() -> None:
        started.set()
        go.wait(timeout=30)
        called.append(1)

    with InterruptibleThreads(1) as threads:
        running = threads.submit(first)
        dropped = threads.submit(lambda: called.append(2))
        started.wait(timeout=30)
        threading.Timer(0.3, go.set).start()
    assert (running.is_done, dropped.is_done, called) == (True, False, [1])


def test_an_interrupt_arrives_at_the_end_of_the_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with defer_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("inside")
        steps.append("after")
    assert steps == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
