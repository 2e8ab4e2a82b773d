"""Time by stage, with a fake clock: every second counts once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ds.preprocess import stage_timer as module
from megatron_ds.preprocess.stage_timer import StageTimer


def test_nested_stage_counts_only_for_the_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    timer = StageTimer()

    def read() -> Iterator[int]:
        for number in range(3):
            now[0] += 1
            yield number

    def work(items: Iterator[int]) -> Iterator[int]:
        for item in items:
            now[0] += 10
            yield item

    for _ in timer.timed_iter("waiting", work(timer.timed_iter("reading", read()))):
        now[0] += 1000  # outside of both
        with timer.stage("writing"):
            now[0] += 100
    assert timer.seconds == {"reading": 3, "waiting": 30, "writing": 300}
