"""The reasons to end a run early, on one process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ds.config import LoggingConfig
from megatron_ds.runtime import Stop
from megatron_ds.training import hooks
from megatron_ds.training.hooks import ExitConditions
from tests.distributed import run_ranks

Make = Callable[..., ExitConditions]


@pytest.fixture(scope="module")
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def stop() -> Stop:
    return Stop()


@pytest.fixture
def make(_one_process: None, stop: Stop) -> Make:
    """make(**logging flags)."""
    return lambda **flags: ExitConditions(LoggingConfig(**flags), stop, torch.device("cpu"))


def test_a_run_goes_on_while_nothing_asks_it_to_end(make: Make, tmp_path: Path) -> None:
    conditions = make(
        exit_interval=5, kill_switch_path=str(tmp_path / "none"), exit_duration_in_mins=60.0
    )
    assert [conditions.reason(iteration) for iteration in range(1, 5)] == [None] * 4
    assert make().reason(1000) is None


def test_the_exit_interval(make: Make) -> None:
    conditions = make(exit_interval=5)
    assert conditions.reason(10) == "exiting program at iteration 10"
    assert conditions.reason(11) is None


def test_the_kill_switch_may_come_at_any_time(make: Make, tmp_path: Path) -> None:
    switch = tmp_path / "switch"
    conditions = make(kill_switch_path=str(switch))
    assert conditions.reason(1) is None
    switch.touch()
    assert conditions.reason(2) == f"Detected kill switch at {switch}. Exiting, iteration=2"


def test_the_clock_counts_from_the_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(hooks.time, "monotonic", lambda: now[0])
    conditions = make(exit_duration_in_mins=2.0)
    now[0] += 120
    assert conditions.reason(1) is None
    now[0] += 1
    assert conditions.reason(1) == "exiting program after 2.0 minutes"


def test_a_signal(make: Make, stop: Stop) -> None:
    conditions = make()
    stop(signal.SIGTERM, None)
    assert conditions.reason(1) == "exiting program after receiving SIGTERM."


def test_the_signal_is_named_before_other_reasons(make: Make, stop: Stop) -> None:
    conditions = make(exit_interval=1)
    stop(signal.SIGTERM, None)
    assert conditions.reason(1) == "exiting program after receiving SIGTERM."


def test_what_one_rank_sees_ends_all(tmp_path: Path) -> None:
    """Each rank has a reason of its own in one of the iterations; the answers are the same."""
    answers = run_ranks(_reasons_of_rank, 2, str(tmp_path))
    assert answers[0] == answers[1]
    assert answers[0] == [
        None,
        "exiting program after receiving SIGTERM.",
        f"Detected kill switch at {tmp_path / 'switch'}. Exiting, iteration=3",
    ]


def _reasons_of_rank(rank: int, folder: str) -> list[str | None]:
    stop = Stop()
    switch = Path(folder, "switch")
    config = LoggingConfig(kill_switch_path=str(switch))
    conditions = ExitConditions(config, stop, torch.device("cpu"))
    reasons = [conditions.reason(1)]
    if rank == 0:
        stop.reason = "SIGTERM"
    reasons.append(conditions.reason(2))
    stop.reason = None
    if rank == 1:
        switch.touch()
    return [*reasons, conditions.reason(3)]
