"""What the ranks of a run exchange at its start grows with their number, not with its square.

Claim (command-line): what simulated ranks exchange when they meet grows with their number from 64
to 256, in the proofs to 1,024, and gloo connects ranks on demand
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks.simulated_ranks import RANKS_PER_HOST, RankThreads, attend_roll_call, say_where
from megatron_ds.launch import environment
from tests.proofs.cases import with_proofs

SIZES = with_proofs([256, 1024], [1024])
"""Ranks of a run that is compared with one of a quarter of them."""


@pytest.mark.parametrize("size", SIZES)
def test_start_traffic_grows_with_the_ranks(size: int) -> None:
    traffic = {}
    for count in (size // 4, size):
        ranks = RankThreads(count)
        results = ranks.run(say_where)
        traffic[count] = ranks.store.traffic
        for rank, (locations, missing) in enumerate(results):
            first = rank - rank % RANKS_PER_HOST
            own = {0, *range(first, first + RANKS_PER_HOST)}
            assert {*locations} == (own if rank else {*range(count)})
            assert locations[rank].process.pid == rank
            hosts = [f"node{number}" for number in range(1, count // RANKS_PER_HOST)]
            assert missing == ({} if rank else {"HF_HOME": hosts})
    check_growth(traffic)


@pytest.mark.parametrize("size", SIZES)
def test_traffic_of_the_roll_call_grows_with_the_ranks(size: int) -> None:
    traffic = {}
    for count in (size // 4, size):
        ranks = RankThreads(count)
        assert ranks.run(attend_roll_call) == [True] * count
        traffic[count] = ranks.store.traffic
    check_growth(traffic)


def check_growth(traffic: dict[int, Counter[str]]) -> None:
    few, many = traffic
    for kind in ("requests", "bytes"):
        growth = traffic[many][kind] / traffic[few][kind]
        assert growth < 4.2, f"{kind}: x{growth:.1f} from {few} to {many} ranks"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts in /proc")
def test_a_gloo_group_connects_ranks_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every two ranks would be connected, and all addresses be in the store of each."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    environment.prepare_environment()
    count = 8
    store = dist.HashStore()
    groups = list[object]()

    def join(rank: int) -> None:
        with suppress(RuntimeError):
            groups.append(dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=2)))

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert len(groups) == count
    assert len(os.listdir("/proc/self/fd")) - before < 5 * count
