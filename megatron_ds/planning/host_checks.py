"""Checks before any rank starts that memory and disks of the host hold what a run keeps there."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config import Config
from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config import generate, passthrough
from megatron_ds.engine.optimizers.adam_kernels import available_on
from megatron_ds.launch import cpp_ops, device, environment
from megatron_ds.launch.device import DeviceCapacity, proc_bytes
from megatron_ds.model.declaration.architecture import param_group_problems
from megatron_ds.model.declaration.fp8 import fp8_problems
from megatron_ds.planning.memory_estimate import MemoryEstimate, planned_memory
from megatron_ds.planning.swap_disk import Disk

CAP_IPC_LOCK = 14
"""Number of the capability with which a process locks memory beyond its limit."""
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SLOW_SECONDS = 1.0
"""Seconds of reading and writing per step from which a warning reports them."""


@dataclass(frozen=True)
class Host:
    """Resources of this host for the processes of a run. Sizes are in bytes."""

    kind: str
    """Kind of the device, such as "cpu"."""
    processes: int
    """Processes of the run on this host."""
    total: float
    """Memory."""
    available: float
    """Memory that no process uses."""
    lockable: float
    """Memory that a process may lock."""
    device: DeviceCapacity | None = None
    """None on a CPU, or if this process sees no accelerator."""
    disk: Disk | None = None
    """Disk for the states that are offloaded to NVMe, measured by the first process; None on other
    processes."""

    @classmethod
    def here(cls, processes: int, disk: Disk | None) -> Host:
        """The host of this process.

        Args:
            processes: Processes of the run on this host.
            disk: The disk of --nvme-path, which the first of them measures; None on others.
        """
        device_type = device.kind()
        accelerator = None
        rank = environment.local_rank()
        if not is_host(device_type):
            is_shared = environment.has_shared_devices()
            accelerator = device.capacity(rank, processes, is_shared=is_shared)
        memory = (total_memory(), available_memory(), lockable_memory())
        return cls(device_type, processes, *memory, accelerator, disk)


def total_memory() -> float:
    """Bytes that the processes of this host, or container, can have; infinite if unknown."""
    limits = [proc_bytes("meminfo", "MemTotal") or math.inf]
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):
            limits.append(float(Path(path).read_text()))
    return min(limits)


def available_memory() -> float:
    """Bytes that new processes can have without swapping; infinite if unknown."""
    return min(total_memory(), proc_bytes("meminfo", "MemAvailable") or math.inf)


def lockable_memory() -> float:
    """Bytes that this process may lock (`ulimit -l`); infinite without a limit."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        capabilities = next(line for line in lines if line.startswith("CapEff:"))
        if int(capabilities.split()[1], 16) >> CAP_IPC_LOCK & 1:
            return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def problems(
    config: Config, dp_size: int, host: Host, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
    """Check what the settings need of a host.

    Args:
        config: Complete configuration without problems.
        dp_size: Data-parallel size.
        host: The host of this process.
        warn: Called with each warning.
    """
    yield from param_group_problems(config)
    yield from fp8_problems(config)
    yield from _passed_key_problems(config, host.kind, warn)
    yield from _attention_problems(config, host.kind, warn)
    ds_config = generate.build_ds_config(config, dp_size, host.kind, available_on(host.kind))
    ops = generate.cpp_ops(ds_config)
    # swap_disk.py checks the op for swapping.
    yield from cpp_ops.problems([op for op in ops if op is not cpp_ops.ASYNC_IO])
    estimate = planned_memory(config, dp_size, host.kind)
    mode = config.runtime.memory_check
    excesses = [*_host_excesses(estimate, host), *_device_excesses(estimate, host.device)]
    for problem, is_certain in excesses if mode != "off" else ():
        if is_certain and mode == "error":
            yield problem
        else:
            warn(problem)
    if estimate.locked > host.lockable:
        needed = estimate.locked / 1e6
        limit = host.lockable / 1e6
        yield Problem("locked-memory-exceeded", needed=needed, limit=limit)
    if host.disk is not None:
        yield from _disk_problems(host.disk, host.processes * sum(estimate.disk.values()), warn)
    if config.deepspeed.uses_nvme:
        yield from generate.swap_buffer_problems(config, dp_size)


def _passed_key_problems(
    config: Config, backend: str, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
    """Keys that are passed on only where DeepSpeed supports them."""
    for passed in passthrough.find(config):
        if (reason := passthrough.unsupported_reason(passed)) is not None:
            yield Problem("passed-key-unsupported", key=passed.key, device=backend, reason=reason)
        elif passed.is_approximation:
            warn(Problem("passed-key-approximates", key=passed.key, effect=passed.effect))
        else:
            warn(Problem("passed-key-unverified", key=passed.key, effect=passed.effect))


def _attention_problems(
    config: Config, device_type: str, warn: Callable[[Problem], None]
) -> Iterator[Problem]:
    """A kernel of attention that was chosen, but that torch does not have for these layers."""
    choice = config.runtime.attention_backend
    model = config.model
    if choice == "auto" or is_host(device_type):
        if choice != "auto":
            warn(Problem("attention-backend-on-host", settings=config.runtime))
        return
    import torch

    from megatron_ds.model.attention.backends import selected_backend
    from megatron_ds.model.attention.cores import order_of
    from megatron_ds.model.attention.rule import attention_rules

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes[config.precision.name]
    shards = config.parallel.head_ranks
    device = torch.device(device_type)
    order = order_of(choice, sizes_vary=False)
    batch = config.schedule.micro_batch_size
    is_exact = config.runtime.deterministic_mode  # which torch does not know yet
    names = {
        selected_backend(rule, model, batch, shards, dtype, device, order)
        for rule in dict.fromkeys(attention_rules(model))
    }
    if None in names or (is_exact and "cudnn" in names):
        layer = f"{config.precision.name}, heads of {model.head_dim}"
        layer += " and ALiBi's bias" if model.position_embedding_type == "alibi" else ""
        layer += " in deterministic mode" if is_exact else ""
        yield Problem("attention-backend-unsupported", settings=config.runtime, layer=layer)


def _host_excesses(estimate: MemoryEstimate, host: Host) -> Iterator[tuple[Problem, bool]]:
    """Yields excesses over the host's memory, and whether the run certainly cannot start."""
    usage = sum(estimate.host.values()) + (estimate.peak if is_host(host.kind) else 0)
    if host.disk is not None and host.disk.is_in_memory:
        usage += sum(estimate.disk.values())
    needed = host.processes * usage
    count = host.processes
    total = host.total
    free = host.available
    size = needed / 1e9
    if needed > total:
        total /= 1e9
        yield Problem("host-memory-exceeded", needed=size, processes=count, total=total), True
    elif needed > free:
        free /= 1e9
        yield Problem("host-memory-short", needed=size, processes=count, free=free), False


def _device_excesses(
    estimate: MemoryEstimate, capacity: DeviceCapacity | None
) -> Iterator[tuple[Problem, bool]]:
    """Yields excesses over the device's memory. Only the states are certain, not the peak."""
    if capacity is None:
        return
    count = capacity.processes
    total = capacity.total / 1e9
    free = capacity.free / 1e9
    states = count * estimate.states / 1e9
    peak = count * estimate.peak / 1e9
    if states > total:
        exceeded = Problem("device-memory-exceeded", needed=states, processes=count, total=total)
        yield exceeded, True
    elif peak > free:
        yield Problem("device-memory-short", needed=peak, processes=count, free=free), False


def _disk_problems(disk: Disk, stored: int, warn: Callable[[Problem], None]) -> Iterator[Problem]:
    folder = disk.folder
    rate = disk.rate
    size = stored / 1e9
    if disk.is_in_memory:
        warn(Problem("nvme-path-in-memory", folder=folder))
    if disk.free < stored:
        yield Problem("nvme-path-too-small", folder=folder, free=disk.free / 1e9, needed=size)
    seconds = stored / rate.read + stored / rate.write
    if seconds > SLOW_SECONDS:
        rates = {"read": rate.read / 1e9, "write": rate.write / 1e9}
        warn(Problem("nvme-takes", folder=folder, stored=size, seconds=seconds, **rates))
