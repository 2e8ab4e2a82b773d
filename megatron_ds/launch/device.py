"""The device: its number formats and the memory in use.

The only file, with config/devices.py, that may name a kind of device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds.config.devices import HOST, is_host
from megatron_ds.config.problems import user_error

if TYPE_CHECKING:
    import torch

DEVICE_PACKAGES = (
    "torch_npu", "torch_sdaa", "torch_mlu", "torch_supa", "torch_xmlir", "habana_frameworks",
)  # fmt: skip
"""Packages that bring devices which DeepSpeed supports and torch itself does not know."""


MEMORY_EVENTS = 1_000_000
"""Most allocations of a history."""
FP16_FEATURES = frozenset({"avx512_fp16", "amx_fp16", "avx_ne_convert"})
"""CPU features, as named by Linux; with any of them torch may compute in fp16 on a CPU."""


def known_without_fp16() -> bool:
    """Whether the device is known, without importing torch, to be a CPU without fp16.

    False if unknown: then the check after the import of torch decides.
    """
    cpu_info = Path("/proc/cpuinfo")
    if not _is_known_to_be_cpu() or not cpu_info.exists():
        return False
    lines = cpu_info.read_text(encoding="utf-8", errors="replace").splitlines()
    features = next((line for line in lines if line.startswith("flags")), None)
    return features is not None and not FP16_FEATURES & set(features.split())


def kind() -> str:
    """Kind of the device, such as "cpu", without importing torch where the answer is known."""
    if _is_known_to_be_cpu():
        return HOST
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def visible_devices() -> int | None:
    """Number of accelerator devices that this process sees; None on a machine without any."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    return None if is_host(accelerator.device_name()) else int(accelerator.device_count())


def device_index(
    local_rank: int, local_size: int | None, count: int, *, is_shared: bool, may_share: bool = False
) -> int:
    """The index of this process's device among those that it sees.

    Args:
        local_rank: Rank of this process on its host.
        local_size: Number of processes on the host; None if unknown.
        count: Number of devices that this process sees.
        is_shared: Whether the other processes of the host see the same devices.
        may_share: Whether several processes may use one device, which gloo allows and NCCL does
            not.

    Raises:
        UserError: If there are more processes than devices.
    """
    if count == 1 and not is_shared:
        return 0  # a device of its own
    if may_share and count:
        return local_rank % count
    processes = max(local_rank + 1, local_size or 0)
    if processes > count:
        raise user_error("more-processes-than-devices", processes=processes, devices=count)
    return local_rank


def sum_dtype(device_type: str) -> torch.dtype:
    """Type of sums on a device: fp64, or fp32 on an accelerator without it, such as Apple's GPUs.

    Args:
        device_type: The type of a `torch.device`.
    """
    import torch

    if is_host(device_type):
        return torch.float64
    from deepspeed.accelerator import get_accelerator

    return torch.float64 if get_accelerator().is_fp64_supported() else torch.float32


def lacks_toolkit() -> bool:
    """Whether the toolkit that DeepSpeed needs for its I/O ops is missing.

    With CUDA and ROCm the ops include headers of it. An installation may have them compiled.
    """
    if _is_known_to_be_cpu():
        return False
    import torch
    from deepspeed.git_version_info import installed_ops
    from torch.utils import cpp_extension

    home = cpp_extension.CUDA_HOME if torch.version.hip is None else cpp_extension.ROCM_HOME
    return torch.cuda.is_available() and home is None and not installed_ops.get("async_io")


@dataclass(frozen=True)
class DeviceCapacity:
    """Memory in bytes of a device, and how many processes of this run use it."""

    free: float
    total: float
    processes: int


def capacity(local_rank: int, processes: int, *, is_shared: bool) -> DeviceCapacity | None:
    """The capacity of this process's accelerator; None if it sees none.

    Args:
        local_rank: Rank of this process on its host.
        processes: Processes on the host.
        is_shared: See `device_index`.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if not (count := accelerator.device_count()):
        return None
    index = local_rank % count
    total = accelerator.total_memory(index)
    free = total
    # NVML does not know all names of devices that CUDA_VISIBLE_DEVICES can have.
    with suppress(RuntimeError, ValueError, IndexError):
        free = accelerator.available_memory(index)
    sharing = 1 if count == 1 and not is_shared else -(-processes // count)
    return DeviceCapacity(free, total, sharing)


def device_memory() -> dict[str, int]:
    """Bytes and count of the device's allocations by TensorBoard tag; empty on a CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if is_host(accelerator.device_name()):
        return {}
    stats = accelerator.memory_stats() or {}
    return {
        "mem-reserved-bytes": stats.get("reserved_bytes.all.current", 0),
        "mem-allocated-bytes": stats.get("allocated_bytes.all.current", 0),
        "mem-allocated-count": stats.get("allocation.all.current", 0),
    }


@contextmanager
def memory_history(path: Path) -> Iterator[None]:
    """Records allocations inside and writes them for pytorch.org/memory_viz.

    Does nothing on a device whose allocator has no such history, as on a CPU.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    module = torch.get_device_module(get_accelerator().device_name())
    memory: Any = getattr(module, "memory", None)
    if not hasattr(memory, "_record_memory_history"):
        yield
        return
    memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        yield
        memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)


class PeakMemory:
    """Peak memory of this process since `restart`, beyond what was in use at construction.

    Device memory, or the resident set size of the process on a CPU.
    """

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        self._accelerator = get_accelerator()
        self.on_host = is_host(self._accelerator.device_name())
        self.restart()
        if self.on_host:
            self._before = proc_bytes("self/status", "VmRSS")
        else:
            self._before = self._accelerator.memory_allocated()

    def restart(self) -> None:
        """Forgets the peak so far, but not what was in use at construction."""
        if not self.on_host:
            self._accelerator.reset_peak_memory_stats()
            return
        # Not Linux, or not permitted: the peak is that since process start.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def bytes(self) -> int | None:
        """The peak in bytes; None if the system does not report it."""
        if not self.on_host:
            return int(self._accelerator.max_memory_allocated()) - (self._before or 0)
        peak = proc_bytes("self/status", "VmHWM")
        return None if peak is None or self._before is None else peak - self._before


def _is_known_to_be_cpu() -> bool:
    requested = os.environ.get("DS_ACCELERATOR")
    if requested is None and version("torch").endswith("+cpu"):
        requested = None if any(map(find_spec, DEVICE_PACKAGES)) else HOST
    return requested == HOST


def proc_bytes(file: str, name: str) -> int | None:
    """Value of an entry of a file of /proc in bytes; None without such an entry.

    Args:
        file: Such as `meminfo`.
        name: Such as `MemTotal`.
    """
    with suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
