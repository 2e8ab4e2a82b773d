"""Environment variables that a launcher does not pass on to all hosts.

`deepspeed` starts the ranks over ssh, and `mpirun` the ranks of other hosts: they get the variables
of a new shell and the few that the launcher exports.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.checks import shortened
from megatron_ds.launch import environment
from megatron_ds.launch.ranks import launched_hosts
from megatron_ds.launch.watch import liveness

PREFIXES = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "MEGATRON_DS_",
    "HF_",
    "WANDB_",
    "PYTORCH_",
    "TRITON_",
    "TORCH_EXTENSIONS_DIR",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "OMP_NUM_THREADS",
    "DS_ACCELERATOR",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
)
"""The beginnings of the names that change what a run does, or where it reads and writes."""
SHOWN_HOSTS = 3


@dataclass(frozen=True)
class HostVariables:
    """Names of relevant variables of a rank, and of the command that started it."""

    host: str
    own: frozenset[str]
    """Names at the start of the rank; libraries set further variables later."""
    launcher: frozenset[str]
    """Only of a `deepspeed` command that runs on this host and started this rank over ssh."""

    @classmethod
    def here(cls) -> HostVariables:
        """Variables of this process, which looks for the command if it is the first of its host."""
        initial = liveness.initial_environment(os.getpid())
        names = _launcher_names() if environment.local_rank() == 0 else frozenset()
        return cls(socket.gethostname(), _relevant(initial), _relevant(names))

    def to_json(self) -> list[Any]:
        return [self.host, sorted(self.own), sorted(self.launcher)]

    @classmethod
    def from_json(cls, values: Sequence[Any]) -> HostVariables:
        return cls(values[0], frozenset(values[1]), frozenset(values[2]))


def find_missing(ranks: Sequence[HostVariables]) -> dict[str, list[str]]:
    """Variables of the command that ranks lack, and variables of rank 0 that other hosts lack.

    Args:
        ranks: Variables by rank.

    Returns:
        By variable, the hosts that lack it, in the order of their ranks.
    """
    first = ranks[0]
    missing = {}
    for name in sorted(first.own.union(*(rank.launcher for rank in ranks))):
        lacking = [rank.host for rank in ranks if name not in rank.own]
        if name in first.own:
            lacking = [host for host in lacking if host != first.host]
        if lacking:
            missing[name] = list(dict.fromkeys(lacking))
    return missing


def describe(missing: Mapping[str, list[str]]) -> str:
    """Variables and hosts in one line: `HF_HOME (node1, node2), NCCL_DEBUG (node2)`."""
    return ", ".join(f"{name} ({shortened(hosts, SHOWN_HOSTS)})" for name, hosts in missing.items())


def _relevant(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name for name in names if name.startswith(PREFIXES))


def _launcher_names() -> frozenset[str]:
    """Variables of the client of ssh, on this host, that started this rank's DeepSpeed agent.

    It has the variables of the `deepspeed` command. Empty without such a client: the command runs
    on another host, or started the agent without ssh.
    """
    pids = launched_hosts.ssh_clients()
    return liveness.initial_environment(min(pids)) if pids else frozenset()
