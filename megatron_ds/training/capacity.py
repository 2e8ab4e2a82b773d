"""Checks before any rank starts that memory and disks of the host hold what a run keeps there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_ds.config import Config, passed_keys
from megatron_ds.config.problems import Problem
from megatron_ds.engine import device_support
from megatron_ds.engine.memory_estimate import MemoryEstimate, planned_memory
from megatron_ds.fileio import disk_rate
from megatron_ds.launch import device, host_memory, libaio

SLOW_SECONDS = 1.0
"""Seconds of reading and writing per step from which a warning tells them."""


def problems(
    config: Config, dp_size: int, processes: int, is_first: bool, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
    """Check what the settings need of this host.

    Args:
        config: Complete configuration without problems.
        dp_size: Data-parallel size.
        processes: Processes of this run on this host.
        is_first: Whether this is the first of them, which measures the disk.
        warn: Called with each warning.
    """
    kind = device.kind()
    yield from _passed_key_problems(config, kind, warn)
    estimate = planned_memory(config, dp_size, kind)
    yield from _memory_problems(estimate, processes, kind, warn)
    if config.deepspeed.uses_nvme and is_first:
        yield from _disk_problems(config, estimate, processes, warn)


def _passed_key_problems(
    config: Config, kind: str, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
    """Keys that are passed on only where DeepSpeed supports them."""
    for passed in passed_keys.find(config):
        if (reason := device_support.find_obstacle(passed.key)) is not None:
            yield Problem("passed-key-unsupported", key=passed.key, device=kind, reason=reason)
        elif passed.is_approximation:
            warn(Problem("passed-key-approximates", key=passed.key, effect=passed.effect))
        else:
            warn(Problem("passed-key-unverified", key=passed.key, effect=passed.effect))


def _memory_problems(
    estimate: MemoryEstimate, processes: int, kind: str, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
    own = sum(estimate.host.values()) + (estimate.peak if kind == "cpu" else 0)
    needed, total, free = processes * own, host_memory.total(), host_memory.available()
    size = needed / 1e9
    if needed > total:
        total /= 1e9
        yield Problem("host-memory-exceeded", needed=size, processes=processes, total=total)
    elif needed > free:
        free /= 1e9
        warn(Problem("host-memory-short", needed=size, processes=processes, free=free))
    if estimate.locked > (limit := host_memory.lockable()):
        yield Problem("locked-memory-exceeded", needed=estimate.locked / 1e6, limit=limit / 1e6)


def _disk_problems(
    config: Config, estimate: MemoryEstimate, processes: int, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
    if (problem := libaio.find_problem()) is not None:
        yield problem
    folder, stored = Path(str(config.deepspeed.nvme_path)), processes * sum(estimate.disk.values())
    try:
        rate = disk_rate.measure(folder)
    except OSError as error:
        yield Problem("nvme-path-unusable", folder=folder, error=error)
        return
    free = shutil.disk_usage(folder).free
    if free < stored:
        yield Problem("nvme-path-too-small", folder=folder, free=free / 1e9, needed=stored / 1e9)
    seconds = stored / rate.read + stored / rate.write
    if seconds > SLOW_SECONDS:
        size, read, write = stored / 1e9, rate.read / 1e9, rate.write / 1e9
        warning = Problem(
            "nvme-takes", folder=folder, read=read, write=write, stored=size, seconds=seconds
        )
        warn(warning)
