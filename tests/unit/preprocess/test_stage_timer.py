"""Seconds by stage: each is counted once, by a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ds.preprocess import stage_timer as module
from megatron_ds.preprocess.stage_timer import StageTimer


def test_an_inner_stage_is_not_the_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    spent = StageTimer()

    def read() -> Iterator[int]:
        for number in range(3):
            now[0] += 1
            yield number

    def work(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            now[0] += 10
            yield item

    for _ in spent.timed_iter("waiting", work(spent.timed_iter("reading", read()))):
        now[0] += 1000  # outside of both
        with spent.stage("writing"):
            now[0] += 100
    spent.add("parsing", 5)
    assert spent.seconds == {"reading": 3, "waiting": 30, "writing": 300, "parsing": 5}


def test_a_stage_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    spent = StageTimer()

    def fail() -> None:
        with spent.stage("encoding"):
            now[0] += 2
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert spent.seconds == {"encoding": 2}
