"""A host that gives no sign of life is lost, and one that gives signs is not.

Claim (command-line): a host that gives no sign of life is lost, one that is late is not, and rank 0
and the ranks of other hosts name it
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.ranks.distributed import ExitBoard
from megatron_ds.launch.watch import poll_clock
from megatron_ds.launch.watch.host_watch import HostWatch
from megatron_ds.launch.watch.liveness import HostLocation, ProcessHandle, RankExit

HOSTS = "aabbc"
LOCATIONS = {rank: HostLocation(host, ProcessHandle(rank, None)) for rank, host in enumerate(HOSTS)}


class Board(ExitBoard):
    """Signs of life in this process."""

    def __init__(self) -> None:
        self._signs: Counter[int] = Counter()

    def give_sign(self, rank: int) -> None:
        self._signs[rank] += 1

    def signs(self, ranks: Iterable[int]) -> list[bytes]:
        return [str(self._signs[rank] or "").encode() for rank in ranks]


def watches(timeout_s: float = 10.0, *, is_starting: bool = False) -> list[HostWatch]:
    found = [HostWatch(known(rank), rank, timeout_s, 0.5) for rank in LOCATIONS]
    for watch in found:
        watch.is_starting = is_starting
    return found


def known(rank: int) -> dict[int, HostLocation]:
    """The locations that a rank knows."""
    return {
        number: location
        for number, location in LOCATIONS.items()
        if rank == 0 or number == 0 or location.host == LOCATIONS[rank].host
    }


def exchanged(board: Board, watches: list[HostWatch], alive: str, times: int) -> RankExit | None:
    """What rank 0 finds after as many polls."""
    found = None
    for _ in range(times):
        for rank, watch in reversed(list(enumerate(watches))):
            if HOSTS[rank] in alive:
                found = watch.exchange(board)
    return found


def test_rank_0_names_the_host_that_gives_no_sign() -> None:
    ranks = watches()
    board = Board()
    assert exchanged(board, ranks, "abc", 50) is None
    assert exchanged(board, ranks, "ac", 20) is None
    lost = exchanged(board, ranks, "ac", 1)
    assert lost is not None
    assert (lost.rank, lost.code) == (2, ExitCode.PEER_LOST)
    assert lost.place == "2 on b"
    assert "has given no sign of life for 10 s (--host-timeout)" in lost.reason
    assert exchanged(board, ranks, "abc", 1) is None  # it was only late


def test_ranks_of_other_hosts_notice_that_the_store_is_silent() -> None:
    ranks = watches()
    board = Board()
    for times, is_lost in ((20, False), (1, True)):
        found = [[rank.poll() for _ in range(times)][-1] for rank in ranks]
        assert [exit is not None for exit in found] == [is_lost and host != "a" for host in HOSTS]
    assert found[4] is not None
    assert found[4].place == "0 on a"
    ranks[4].exchange(board)
    assert ranks[4].poll() is None


def test_a_host_that_never_gives_a_sign_is_lost() -> None:
    """Its power failed right after the ranks had met."""
    ranks = watches()
    board = Board()
    assert exchanged(board, ranks, "ab", 21) is None
    lost = exchanged(board, ranks, "ab", 1)
    assert lost is not None
    assert lost.place == "4 on c"


@pytest.mark.parametrize(("timeout_s", "polls"), [(10.0, 120), (90.0, 180)])
def test_a_host_has_a_minute_or_longer_during_the_start(timeout_s: float, polls: int) -> None:
    ranks = watches(timeout_s, is_starting=True)
    board = Board()
    exchanged(board, ranks, "abc", 2)
    assert exchanged(board, ranks, "ac", polls) is None
    assert exchanged(board, ranks, "ac", 1) is not None
    assert [[ranks[4].poll() for _ in range(polls + 1)][index] is None for index in (-2, -1)] == [
        True,
        False,
    ]


def test_a_process_that_did_not_run_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(poll_clock.time, "monotonic", lambda: now[0])
    watch = watches()[0]
    for seconds, is_long in ((0.5, False), (10.0, False), (10.5, True), (0.5, True)):
        now[0] += seconds
        assert watch.was_suspended == is_long  # also before the next poll
        watch.poll()
    assert watch.suspended_s == 10.5


def test_a_single_host_is_not_watched() -> None:
    alone = HostWatch({0: LOCATIONS[0], 1: LOCATIONS[1]}, 1, 1.0, 0.5)
    assert not any(alone.poll() for _ in range(100))
    assert HostWatch().poll() is None
