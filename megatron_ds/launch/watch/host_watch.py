"""Watch for hosts that are lost without a trace, such as by a power failure or a broken link.

The kernel of such a host closes no connection, so that collectives would wait for it until their
timeout. The first rank of each host gives a sign of life in the store of the run, which rank 0
reads; the ranks of other hosts notice when the store, which is on the host of rank 0, is silent.
Time is counted in polls of this process: while it is suspended itself, none passes. During the
start, work that holds the interpreter may delay signs: a host has longer then.

Starts no thread and ends no process: `lifecycle` polls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.ranks.distributed import ExitBoard
from megatron_ds.launch.watch.liveness import HostLocation, RankExit
from megatron_ds.launch.watch.poll_clock import PollClock

START_S = 60.0
"""Shortest time after which a host is lost during the start."""


class HostWatch:
    """Counts the polls without a sign of life of other hosts; without hosts, none is watched.

    Attributes:
        is_starting: Whether the run has not begun to train.

    Args:
        locations: Locations of rank 0 and of the ranks of this host; on rank 0, of all ranks.
        rank: This rank.
        timeout_s: Seconds of silence after which a host is lost.
        poll_s: Seconds between two polls.
    """

    def __init__(
        self,
        locations: Mapping[int, HostLocation] = MappingProxyType({}),
        rank: int = 0,
        timeout_s: float = math.inf,
        poll_s: float = 1.0,
    ) -> None:
        first_ranks: dict[str, int] = {}
        for peer, location in sorted(locations.items()):
            first_ranks.setdefault(location.host, peer)
        self._locations = locations
        self._rank = rank
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self.is_starting = True
        self._clock = PollClock()
        self._others = [*first_ranks.values()][1:]
        self._is_elsewhere = bool(locations) and locations[rank].host != locations[0].host
        self._signs: list[bytes] = []
        self._silent = dict.fromkeys(self._others, 0)
        self._unanswered = 0

    def exchange(self, board: ExitBoard) -> RankExit | None:
        """Gives a sign of life of this host. May block as long as the store does.

        Returns:
            On rank 0, the loss of a host.
        """
        if self._rank in self._others:
            board.give_sign(self._rank)
        self._unanswered = 0
        if self._rank != 0 or not self._others:
            return None
        signs = board.signs(self._others)
        for first, sign, before in zip(self._others, signs, self._signs, strict=False):
            self._silent[first] = self._silent[first] + 1 if sign == before else 0
        self._signs = signs
        return next(filter(None, (self._lost(*item) for item in self._silent.items())), None)

    @property
    def suspended_s(self) -> float:
        """The longest time that has passed between two polls."""
        return self._clock.longest_s

    @property
    def was_suspended(self) -> bool:
        """Whether this process did not run for so long that its peers have taken it for lost."""
        return self.suspended_s > self._timeout_s

    def poll(self) -> RankExit | None:
        """The loss of the host of rank 0, if its store has not answered for too long."""
        self._clock.poll()
        self._unanswered += self._is_elsewhere
        return self._lost(0, self._unanswered)

    def _lost(self, first: int, polls: int) -> RankExit | None:
        limit_s = max(self._timeout_s, START_S) if self.is_starting else self._timeout_s
        if polls * self._poll_s <= limit_s:
            return None
        host = f" on {self._locations[first].name}"
        reason = f"has given no sign of life for {limit_s:g} s (--host-timeout): its host"
        reason = f"{reason} cannot be reached, or its process is stopped"
        return RankExit(first, reason, ExitCode.PEER_LOST, host)
