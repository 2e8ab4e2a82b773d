"""Conditions that end a run early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ds.config import StoppingConfig
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process.stop_request import StopReason, StopRequest
from megatron_ds.training import exit_conditions
from megatron_ds.training.exit_conditions import ExitConditions, StopDecision

Make = Callable[..., ExitConditions]


@pytest.fixture
def stop() -> StopRequest:
    return StopRequest()


@pytest.fixture
def make(one_process: None, stop: StopRequest) -> Make:
    """make(**logging flags): conditions of a program of 2000 iterations, started at 1000 s."""
    return lambda **flags: ExitConditions(
        StoppingConfig(**flags), 2000, stop, None, started_at=1000.0
    )


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(exit_conditions.time, "monotonic", lambda: now[0])
    return now


def message(stop: StopDecision | None) -> str | None:
    return None if stop is None else stop.message


def test_without_a_condition_the_run_continues(make: Make, tmp_path: Path) -> None:
    conditions = make(
        exit_interval=5, kill_switch_path=str(tmp_path / "none"), exit_duration_in_mins=60.0
    )
    assert [conditions.after_step(iteration) for iteration in range(1, 5)] == [None] * 4
    assert make().after_step(1000) is None
    assert make().external_stop(1000) is None


def test_exit_interval_stops_the_run(make: Make) -> None:
    conditions = make(exit_interval=5)
    assert conditions.after_step(10) == StopDecision(
        "exiting program at iteration 10", ExitCode.FINISHED, urgent=False
    )
    assert conditions.after_step(11) is None


def test_the_time_left_ends_with_the_allowed_minutes(make: Make, clock: list[float]) -> None:
    """Claim (logging): the time left follows the batch size and ends at the next exit condition"""
    clock[0] = 1090.0
    assert [make().seconds_left(50.0), make().seconds_left(500.0)] == [50.0, 500.0]
    limited = make(exit_duration_in_mins=2.0)
    assert [limited.seconds_left(20.0), limited.seconds_left(500.0)] == [20.0, 30.0]
    clock[0] = 2000.0
    assert limited.seconds_left(20.0) == 0.0


def test_the_last_iteration_ends_regularly(make: Make, stop: StopRequest) -> None:
    conditions = make(exit_interval=5, exit_duration_in_mins=0.0)
    assert conditions.after_step(2000) is None
    stop.request(StopReason.SIGTERM)
    assert conditions.after_step(2000) == conditions.external_stop(2000)
    assert conditions.after_step(2000) is not None


def test_exit_interval_and_duration_are_no_external_requests(make: Make) -> None:
    assert make(exit_interval=5, exit_duration_in_mins=0.0).external_stop(10) is None


def test_the_kill_switch_may_appear_at_any_time(make: Make, tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    conditions = make(kill_switch_path=str(switch))
    assert conditions.after_step(1) is None
    switch.touch()
    detected = f"Detected kill switch at {switch}. Exiting, iteration=2"
    assert conditions.external_stop(2) == StopDecision(detected, ExitCode.FINISHED, urgent=True)
    assert conditions.after_step(2) == conditions.external_stop(2)


def test_the_first_request_to_stop_counts(stop: StopRequest) -> None:
    stop.request(StopReason.LAUNCHER)
    stop.request(StopReason.SIGTERM)
    assert stop.reason is StopReason.LAUNCHER


def test_the_duration_counts_from_the_start_of_the_program(make: Make, clock: list[float]) -> None:
    conditions = make(exit_duration_in_mins=2.0)
    clock[0] += 120
    assert conditions.after_step(1) is None
    clock[0] += 1
    assert message(conditions.after_step(1)) == "exiting program after 2.0 minutes"


@pytest.mark.parametrize(
    ("reason", "expected", "code"),
    [
        (StopReason.SIGTERM, "exiting program after receiving SIGTERM.", 143),
        (StopReason.SIGINT, "exiting program after receiving SIGINT.", 130),
        (StopReason.LAUNCHER, "exiting program since its launcher is gone.", 143),
        (
            StopReason.FOLDER_LOST,
            "exiting program since another run has taken its --save folder.",
            5,
        ),
    ],
)
def test_external_requests_precede_other_conditions(
    reason: StopReason, expected: str, code: int, make: Make, stop: StopRequest
) -> None:
    conditions = make(exit_interval=1)
    stop.request(reason)
    assert conditions.after_step(1) == StopDecision(expected, ExitCode(code), urgent=True)
    assert conditions.external_stop(1) == conditions.after_step(1)
