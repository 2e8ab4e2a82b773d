"""Checks before any rank starts that memory and disks of the host hold what a run keeps there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_ds.config import Config, passed_keys
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config import device_support
from megatron_ds.engine.ds_config.generate import (
    build_ds_config,
    cpp_ops,
    swap_buffer_problems,
)
from megatron_ds.engine.optimizers.adam_kernels import available_on
from megatron_ds.launch import device, environment
from megatron_ds.launch.cpp_ops import ASYNC_IO
from megatron_ds.launch.cpp_ops import problems as op_problems
from megatron_ds.planning import disk_rate, host_memory
from megatron_ds.planning.disk_rate import DiskRate
from megatron_ds.planning.memory_estimate import MemoryEstimate, planned_memory

SLOW_SECONDS = 1.0
"""Seconds of reading and writing per step from which a warning reports them."""


def problems(
    config: Config,
    dp_size: int,
    processes: int,
    rate: DiskRate | None,
    warn: Callable[[Problem], None],
) -> Iterator[Problem]:
    """Check what the settings need of this host.

    Args:
        config: Complete configuration without problems.
        dp_size: Data-parallel size.
        processes: Processes of this run on this host.
        rate: Rate of the disk of --nvme-path, which the first of them measures; None on others.
        warn: Called with each warning.
    """
    kind = device.kind()
    yield from _passed_key_problems(config, kind, warn)
    ops = cpp_ops(build_ds_config(config, dp_size, kind, available_on(kind)))
    yield from op_problems([op for op in ops if op is not ASYNC_IO])  # libaio.py checks that one
    estimate = planned_memory(config, dp_size, kind)
    folder = Path(str(config.deepspeed.nvme_path))
    is_in_memory = rate is not None and disk_rate.is_in_memory(folder)
    mode = config.runtime.memory_check
    excesses = [
        *_host_excesses(estimate, processes, kind, is_in_memory),
        *(_device_excesses(estimate, processes) if kind != "cpu" else ()),
    ]
    for problem, is_certain in excesses if mode != "off" else ():
        if is_certain and mode == "error":
            yield problem
        else:
            warn(problem)
    if estimate.locked > (limit := host_memory.lockable()):
        yield Problem("locked-memory-exceeded", needed=estimate.locked / 1e6, limit=limit / 1e6)
    if is_in_memory:
        warn(Problem("nvme-path-in-memory", folder=folder))
    if rate is not None:
        yield from _disk_problems(folder, rate, processes * sum(estimate.disk.values()), warn)
    if config.deepspeed.uses_nvme:
        yield from swap_buffer_problems(config, dp_size)


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


def _host_excesses(
    estimate: MemoryEstimate, processes: int, kind: str, disk_is_memory: bool
) -> Iterator[tuple[Problem, bool]]:
    """What exceeds the memory of the host, and whether it is certain that the run cannot start."""
    own = sum(estimate.host.values()) + (estimate.peak if kind == "cpu" else 0)
    if disk_is_memory:
        own += sum(estimate.disk.values())
    needed, total, free = processes * own, host_memory.total(), host_memory.available()
    size = needed / 1e9
    if needed > total:
        total /= 1e9
        yield Problem("host-memory-exceeded", needed=size, processes=processes, total=total), True
    elif needed > free:
        free /= 1e9
        yield Problem("host-memory-short", needed=size, processes=processes, free=free), False


def _device_excesses(estimate: MemoryEstimate, processes: int) -> Iterator[tuple[Problem, bool]]:
    """The same of the device. Its states are certain; the rest of the peak is an estimate."""
    local_rank, is_shared = environment.local_rank(), environment.has_shared_devices()
    own = device.capacity(local_rank, processes, is_shared=is_shared)
    if own is None:
        return
    states, peak = own.processes * estimate.states / 1e9, own.processes * estimate.peak / 1e9
    total, free = own.total / 1e9, own.free / 1e9
    if states > total:
        exceeded = Problem(
            "device-memory-exceeded", needed=states, processes=own.processes, total=total
        )
        yield exceeded, True
    elif peak > free:
        yield Problem("device-memory-short", needed=peak, processes=own.processes, free=free), False


def _disk_problems(
    folder: Path, rate: DiskRate, stored: int, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
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
