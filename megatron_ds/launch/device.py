"""The device: its number formats and the memory in use.

The only file that may name a kind of device.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ds.config import PrecisionConfig


DEVICE_PACKAGES = (
    "torch_npu",
    "torch_sdaa",
    "torch_mlu",
    "torch_supa",
    "torch_xmlir",
    "habana_frameworks",
)
"""Packages by which DeepSpeed finds devices that torch itself does not know."""


FP16_FEATURES = frozenset({"avx512_fp16", "amx_fp16", "avx_ne_convert"})
"""Features of an x86 processor, in Linux's names: with one of them torch may compute in fp16."""


def known_without_fp16() -> bool:
    """Whether the device is a CPU that does not compute in fp16, as far as that can be told
    without torch; False leaves it to `require_precision`.
    """
    named = os.environ.get("DS_ACCELERATOR")
    if named is not None and named != "cpu":
        return False
    if named is None and not (
        version("torch").endswith("+cpu") and not any(map(find_spec, DEVICE_PACKAGES))
    ):
        return False
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    features = next((line for line in about.splitlines() if line.startswith("flags")), None)
    return features is not None and not FP16_FEATURES & set(features.split())


def fp16_error(device: str) -> str:
    """Why --fp16 does not go, and what does."""
    return (
        f"--fp16: DeepSpeed does not train in fp16 on {device}; take --bf16 "
        "(or, for a try, --allow-fp16-on-cpu)"
    )


def require_precision(config: PrecisionConfig) -> None:
    """Raises ValueError for a number format that the device does not compute in.

    --allow-fp16-on-cpu tells DeepSpeed that the device can: torch computes fp16 on a CPU, slowly.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if not config.fp16 or accelerator.is_fp16_supported():
        return
    if not config.allow_fp16_on_cpu:
        raise ValueError(fp16_error(accelerator.device_name()))
    import torch

    kind, known = type(accelerator), accelerator.supported_dtypes()
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: [*known, torch.half]


def deepspeed_version() -> str:
    import deepspeed

    version: str = deepspeed.__version__
    return version


def device_memory() -> dict[str, int]:
    """Bytes (and number) of the device's allocations by TensorBoard tag; empty on a CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {}
    figures = accelerator.memory_stats() or {}
    return {
        "mem-reserved-bytes": figures.get("reserved_bytes.all.current", 0),
        "mem-allocated-bytes": figures.get("allocated_bytes.all.current", 0),
        "mem-allocated-count": figures.get("allocation.all.current", 0),
    }


class PeakMemory:
    """The most memory that this process has had at a time since this was made, beyond what it had
    then: the device's or, where that is a CPU, the process's own.
    """

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        self._accelerator = None if accelerator.device_name() == "cpu" else accelerator
        if self._accelerator is None:
            with suppress(OSError):  # not Linux, or not ours to reset: then the peak is all of it
                Path("/proc/self/clear_refs").write_text("5")
            self._before = _process_status("VmRSS")
        else:
            self._accelerator.reset_peak_memory_stats()
            self._before = self._accelerator.memory_allocated()

    def bytes(self) -> int | None:
        """None where the system does not say."""
        if self._accelerator is not None:
            return int(self._accelerator.max_memory_allocated()) - (self._before or 0)
        peak = _process_status("VmHWM")
        return None if peak is None or self._before is None else peak - self._before


def _process_status(name: str) -> int | None:
    """Bytes of an entry of /proc/self/status, if there is one."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None
