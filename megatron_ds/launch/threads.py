"""Threads of this process, for torch's operators on the host and DeepSpeed's CPU optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable

from megatron_ds.launch.liveness import HostLocation, initial_environment, parent_of

THREADS = "OMP_NUM_THREADS"
IN_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set by torchrun in its ranks, and not in its own environment."""


def choose_threads(own: HostLocation, all_ranks: Iterable[HostLocation]) -> None:
    """Sets the number of threads, unless the user has chosen it in OMP_NUM_THREADS.

    The choice is the same under every launcher. Must precede the load of DeepSpeed's ops, which may
    have an OpenMP of their own, whose number of threads is the variable's.
    """
    import torch

    if THREADS in os.environ and not is_default_of_torchrun():
        return
    count = threads_of(own, all_ranks)
    os.environ[THREADS] = str(count)
    torch.set_num_threads(count)


def threads_of(own: HostLocation, all_ranks: Iterable[HostLocation]) -> int:
    """The cores of a process, divided by the processes of its host that may use one of them.

    A scheduler may have bound each process to cores of its own.
    """
    sharing = sum(rank.host == own.host and bool(rank.cores & own.cores) for rank in all_ranks)
    return max(1, len(own.cores) // max(1, sharing))


def is_default_of_torchrun() -> bool:
    """Whether OMP_NUM_THREADS=1 is from torchrun, which sets it if the user has not."""
    if IN_TORCHRUN not in os.environ or os.environ[THREADS] != "1":
        return False
    pid: int | None = os.getppid()
    while pid:
        names = initial_environment(pid)
        if IN_TORCHRUN not in names:  # torchrun itself, or unreadable
            return bool(names) and THREADS not in names
        pid = parent_of(pid)  # a wrapper of the program
    return False
