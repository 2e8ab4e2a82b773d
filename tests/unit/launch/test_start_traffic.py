"""What the ranks of a run exchange at its start grows with their number, not with its square."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from megatron_ds.launch import distributed
from megatron_ds.launch.distributed import Difference
from megatron_ds.launch.host_variables import HostVariables
from megatron_ds.launch.liveness import HostLocation, ProcessHandle

RANKS_PER_HOST = 8


class CountingStore:
    """A store of this process, which counts the bytes that ranks send and receive."""

    def __init__(self) -> None:
        self.traffic: Counter[str] = Counter()
        self._values: dict[str, str] = {}
        self._counters: Counter[str] = Counter()
        self._is_set: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self._count(key, value)
        self._values[key] = value
        with self._lock:
            self._is_set[key].set()

    def get(self, key: str) -> bytes:
        with self._lock:
            event = self._is_set[key]
        assert event.wait(30.0), key
        self._count(key, self._values[key])
        return self._values[key].encode()

    def add(self, key: str, amount: int) -> int:
        self._count(key, "")
        with self._lock:
            self._counters[key] += amount
            return self._counters[key]

    def _count(self, key: str, value: str) -> None:
        with self._lock:
            self.traffic["requests"] += 1
            self.traffic["bytes"] += len(key) + len(value)


class SimulatedRanks:
    """Ranks as threads of this process, with a store in place of the network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.store, self.count, self._own = CountingStore(), count, threading.local()
        monkeypatch.setattr(distributed, "rank", lambda: self._own.rank)
        monkeypatch.setattr(distributed, "world_size", lambda: count)
        monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: self.store)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """Calls `work` with each rank; returns what the ranks return."""
        results: list[Any] = [None] * self.count

        def run(rank: int) -> None:
            self._own.rank = rank
            results[rank] = work(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        return results


def start(rank: int) -> tuple[dict[int, HostLocation], dict[str, list[str]], Difference | None]:
    """What a rank exchanges before anything of the run is built."""
    host = f"node{rank // RANKS_PER_HOST}"
    location = HostLocation(host, ProcessHandle(rank, "1"), frozenset(range(96)))
    names = frozenset({"HF_HOME"} if rank < RANKS_PER_HOST else {})
    found = distributed.exchange_locations(location, HostVariables(host, names, frozenset()))
    flags = {f"--flag-{number}": "1" for number in range(300)}
    return *found, distributed.find_difference(flags | {"--seed": str(rank == 9)})


def test_start_traffic_grows_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = {}
    for count in (64, 256, 1024):
        ranks = SimulatedRanks(monkeypatch, count)
        results = ranks.run(start)
        traffic[count] = ranks.store.traffic
        for rank, (locations, missing, difference) in enumerate(results):
            first = rank - rank % RANKS_PER_HOST
            own = range(first, first + RANKS_PER_HOST)
            assert [*locations] == [*(own if rank else range(count))]
            assert locations[rank].process.pid == rank
            hosts = [f"node{number}" for number in range(1, count // RANKS_PER_HOST)]
            assert missing == ({} if rank else {"HF_HOME": hosts})
            assert difference == Difference("--seed", 9, "False", "True")
    for kind in ("requests", "bytes"):
        for count in (256, 1024):
            growth = traffic[count][kind] / traffic[count // 4][kind]
            assert growth < 4.2, f"{kind}: x{growth:.1f} from {count // 4} to {count} ranks"
