"""Durations of the phases of start-up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron_ds.launch import startup_timer
from megatron_ds.launch.startup_timer import StartupTimer, process_age


def test_phase_begins_at_the_end_of_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.5, 15.5])
    monkeypatch.setattr(startup_timer, "process_age", lambda: 0.25)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    start = StartupTimer()
    start.mark("settings")
    start.mark("libraries")
    assert start.phases == [("interpreter", 0.25), ("settings", 1.5), ("libraries", 4.0)]
    assert start.summary_line() == (
        "start-up (s) | interpreter: 0.25 | settings: 1.50 | libraries: 4.00 | all: 5.75 |"
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_process_age_increases() -> None:
    first = process_age()
    time.sleep(0.05)
    assert 0 < first < process_age()
