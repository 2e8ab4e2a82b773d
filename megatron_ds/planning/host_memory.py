"""Memory of this host: what there is, what is free, and how much of it may be locked."""

from __future__ import annotations

import math
import resource
from contextlib import suppress
from pathlib import Path

CAP_IPC_LOCK = 14
"""Number of the capability with which a process locks memory beyond its limit."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def total() -> float:
    """Bytes that the processes of this host, or container, can have; infinite if unknown."""
    limits = [_kibibytes("/proc/meminfo", "MemTotal")]
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            limits.append(float(Path(path).read_text()))
    return min(limits)


def available() -> float:
    """Bytes that new processes can have without swapping; infinite if unknown."""
    return min(total(), _kibibytes("/proc/meminfo", "MemAvailable"))


def lockable() -> float:
    """Bytes that this process may lock (`ulimit -l`); infinite without a limit."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        capabilities = next(line for line in lines if line.startswith("CapEff:"))
        if int(capabilities.split()[1], 16) >> CAP_IPC_LOCK & 1:
            return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def _kibibytes(path: str, name: str) -> float:
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return float(line.split()[1]) * 1024
    return math.inf
