"""Which ranks and hosts are reported as slow.

Claim (logging): `--log-straggler` names the ranks and hosts that wait least for the others
"""

from __future__ import annotations

from megatron_ds.config import ProfilingConfig
from megatron_ds.training.loggers.console import time_details

TIMES = {"step": [10.0, 10.0, 10.0, 10.5], "communication": [6.0, 6.0, 2.0, 6.5]}
HOSTS = ["a", "a", "b", "b"]
RANKS = (
    " step without communication (ms) | ranks: 4 | min: 4.00 | median: 4.00 | max: 8.00 | slowest:"
)


def details(times: dict[str, list[float]], hosts: list[str] = HOSTS, **flags: object) -> list[str]:
    return [*time_details(ProfilingConfig(log_straggler=True, **flags), hosts, times)]


def test_the_slowest_rank_is_the_one_that_waits_least_for_the_others() -> None:
    hosts = " step without communication (ms) | hosts: 2 | min: 4.00 | median: 5.00 | max: 6.00 |"
    assert details(TIMES) == [
        f"{RANKS} rank 2 on b 8.00 (+100.0%) |",
        f"{hosts} slowest: b 6.00 (+20.0%) |",
    ]


def test_as_many_ranks_are_named_as_asked_for() -> None:
    (line,) = details(TIMES, ["a"] * 4, straggler_minmax_count=2)
    assert line == f"{RANKS} rank 2 on a 8.00 (+100.0%), rank 0 on a 4.00 (+0.0%) |"


def test_nothing_is_reported_where_no_ranks_are_compared() -> None:
    assert details({}) == []
    assert details({"step": [10.0], "communication": [6.0]}) == []
    assert details({"step": [10.0, 11.0]}) == []  # compiled code, whose collectives have no times


def test_both_kinds_of_lines_are_printed() -> None:
    block, *lines = details(TIMES, timing_log_level=1)
    assert block.startswith("(min, max) time across ranks (ms):\n    step ")
    assert len(lines) == 2
