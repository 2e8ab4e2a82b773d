"""The report of --log-straggler: which ranks and hosts are slower than their peers.

A step ends for all ranks together. The slowest rank is the one that waits least for its peer ranks,
so the times that are compared are those outside collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

from megatron_ds.train_state import COMMUNICATION, STEP


def own_times(times: Mapping[str, Sequence[float]]) -> list[float]:
    """Milliseconds of a step outside collectives, by rank.

    Args:
        times: Times of the parts of the step, by name, on the ranks that have them.

    Returns:
        Nothing for a single rank, and if collectives were not timed.
    """
    steps = times.get(STEP, ())
    waits = times.get(COMMUNICATION, ())
    if len(steps) < 2 or len(waits) != len(steps):
        return []
    busy = [step - wait for step, wait in zip(steps, waits, strict=True)]
    return busy if statistics.median(busy) > 0 else []


def slowest_rank(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The slowest rank and its relative excess over the median, as metrics of a step."""
    busy = own_times(times)
    if not busy:
        return {}
    return {
        "time/slowest_rank": float(busy.index(max(busy))),
        "time/slowest_rank_excess": max(busy) / statistics.median(busy) - 1,
    }


def straggler_lines(
    times: Mapping[str, Sequence[float]], hosts: Sequence[str], count: int
) -> Iterator[str]:
    """The spread of the ranks' times with the slowest ranks, and of the hosts' medians.

    Args:
        times: See `own_times`.
        hosts: Names of the hosts, by rank.
        count: Number of ranks, and of hosts, that are named.
    """
    busy = own_times(times)
    if not busy:
        return
    ranks = {f"rank {rank} on {hosts[rank]}": seconds for rank, seconds in enumerate(busy)}
    yield f" step without communication (ms) | ranks: {_spread(ranks, count)}"
    by_host: dict[str, list[float]] = {}
    for host, seconds in zip(hosts, busy, strict=True):
        by_host.setdefault(host, []).append(seconds)
    if len(by_host) > 1:
        medians = {host: statistics.median(values) for host, values in by_host.items()}
        yield f" step without communication (ms) | hosts: {_spread(medians, count)}"


def _spread(values: Mapping[str, float], count: int) -> str:
    """Such as `2 | min: 3.00 | median: 4.00 | max: 5.00 | slowest: rank 1 on a 5.00 (+25.0%) |`."""
    low, median, high = (of(values.values()) for of in (min, statistics.median, max))
    slowest = sorted(values, key=lambda name: -values[name])[:count]
    named = (
        f"{name} {values[name]:.2f} ({100 * (values[name] / median - 1):+.1f}%)" for name in slowest
    )
    fields = [f"min: {low:.2f}", f"median: {median:.2f}", f"max: {high:.2f}"]
    return "".join(
        f"{x} | " for x in (len(values), *fields, f"slowest: {', '.join(named)}")
    ).rstrip()
