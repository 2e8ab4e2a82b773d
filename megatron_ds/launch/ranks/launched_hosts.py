"""The hosts on which a `deepspeed` command starts the ranks over ssh, as far as this host shows.

Read from the command line of the rank's DeepSpeed agent, and from the clients of ssh that started
the agents, where the command runs on this host.
"""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress

from megatron_ds.launch import environment
from megatron_ds.launch.watch import liveness

SSH_CLIENTS = ("pdsh", "pdsh.bin", "ssh")
WORLD = "--world_info="
AGENT_ARGUMENTS = (WORLD, "--master_addr=", "--master_port=")
"""Arguments of a DeepSpeed agent that distinguish the runs of a host."""
WATCH_INTERVAL_S = 1.0
SHOWN_RANKS = 8


def hosts_of_ranks() -> list[str]:
    """Name of each rank's host; empty if unknown."""
    with suppress(ValueError, AttributeError):
        for word in _agent():
            if word.startswith(WORLD):
                world = json.loads(base64.urlsafe_b64decode(word.removeprefix(WORLD)))
                return [host for host, slots in world.items() for _ in slots]
    return []


def ssh_clients() -> dict[int, list[str]]:
    """Command lines of the clients of ssh on this host that started the agents of this run, by pid.

    Empty if there are none: the command runs on another host, or started the agents without ssh.
    """
    key = [word for word in _agent() if word.startswith(AGENT_ARGUMENTS)]
    above = liveness.find_launchers()[1:]
    is_local = any(liveness.runs(process.pid, liveness.DEEPSPEED_WRAPPERS) for process in above)
    if len(key) < len(AGENT_ARGUMENTS) or is_local:
        return {}
    clients = {}
    for folder in liveness.PROC.glob("[0-9]*"):
        program, *words = liveness.command_of(int(folder.name)) or [""]
        line = " ".join(words)
        if os.path.basename(program) in SSH_CLIENTS and all(word in line for word in key):
            clients[int(folder.name)] = [os.path.basename(program), *words]
    return clients


class LaunchWatch:
    """Watches the connections of the `deepspeed` command to its hosts.

    Only the first rank of the host where the command runs sees them.
    """

    def __init__(self) -> None:
        self._due = 0.0
        self._lost: list[int] = []

    def find_lost_ranks(self) -> list[int]:
        """Ranks of hosts whose client of ssh has ended while clients of other hosts run.

        Looks once in `WATCH_INTERVAL_S`, and finds what two looks have seen.
        """
        if environment.local_rank() or time.monotonic() < self._due:
            return []
        self._due = time.monotonic() + WATCH_INTERVAL_S
        hosts = hosts_of_ranks()
        before = self._lost
        clients = [words for words in ssh_clients().values() if words[0] == "ssh"]
        connected = {host for host in hosts if any(host in words for words in clients)}
        self._lost = [n for n, host in enumerate(hosts) if connected and host not in connected]
        return [rank for rank in self._lost if rank in before]


def describe(ranks: Iterable[int]) -> str:
    """Such as `rank 3`, or `ranks 2, 3 on node2` where the hosts are known."""
    listed = sorted(ranks)
    known = hosts_of_ranks()
    hosts = list(dict.fromkeys(known[rank] for rank in listed if rank < len(known)))
    more = f" and {len(hosts) - SHOWN_RANKS} more" if len(hosts) > SHOWN_RANKS else ""
    return ranks_text(listed) + (f" on {', '.join(hosts[:SHOWN_RANKS])}{more}" if hosts else "")


def ranks_text(ranks: Iterable[int]) -> str:
    """Such as `rank 3`, or `ranks 0, 1, 2`; of many ranks the first ones."""
    listed = sorted(ranks)
    shown = ", ".join(map(str, listed[:SHOWN_RANKS]))
    more = f" and {len(listed) - SHOWN_RANKS} more" if len(listed) > SHOWN_RANKS else ""
    return f"rank{'s' if len(listed) > 1 else ''} {shown}{more}"


def _agent() -> list[str]:
    """Command line of this rank's launcher, which may be a DeepSpeed agent."""
    launchers = liveness.find_launchers()
    return liveness.command_of(launchers[0].pid) if launchers else []
