"""Devices for which a run can be planned: data-sheet rates, and how much of them runs reach.

The peaks are those of dense matrix products, from the vendors' data sheets. `efficiency`, the share
of the peak that the products of large models reach, and the machines' memory and storage are
assumptions.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config.devices import HOST

GB = 1e9
DEFAULT = "h100"


@dataclass(frozen=True)
class Hardware:
    """A kind of device in machines of several. Rates are per device and direction."""

    name: str
    tflops_16: float
    """10^12 operations per second in bf16 and fp16."""
    tflops_32: float
    """In fp32 (without TF32)."""
    memory: float
    """Bytes."""
    memory_rate: float
    """Bytes per second of the device's memory."""
    per_machine: int
    """Devices of a machine."""
    inside: float
    """Bytes per second to the other devices of a machine."""
    between: float
    """Bytes per second to other machines."""
    efficiency: float = 0.55
    host: float = 25 * GB
    """Bytes per second between a device and the memory of its machine."""
    host_memory: float = 250 * GB
    """Bytes of the machine's memory for each device."""
    storage: float = 2 * GB
    """Bytes per second that a machine writes to the file system of checkpoints."""

    @property
    def kind(self) -> str:
        """What decides about kernels and DeepSpeed's defaults: a CPU or another device."""
        return HOST if self.name == HOST else "accelerator"

    def tflops(self, precision: str) -> float:
        """The peak in a number format."""
        return self.tflops_32 if precision == "fp32" else self.tflops_16


HARDWARE = {
    each.name: each
    for each in (
        Hardware("h100", 989, 67, 80 * GB, 3350 * GB, 8, 450 * GB, 50 * GB),
        Hardware("h200", 989, 67, 141 * GB, 4800 * GB, 8, 450 * GB, 50 * GB),
        Hardware("a100", 312, 19.5, 80 * GB, 2039 * GB, 8, 300 * GB, 25 * GB),
        Hardware("mi300x", 1307, 163, 192 * GB, 5300 * GB, 8, 448 * GB, 50 * GB, 0.4),
        Hardware("910b", 320, 80, 64 * GB, 1600 * GB, 8, 196 * GB, 25 * GB, 0.5),
        Hardware(HOST, 1, 0.4, 64 * GB, 40 * GB, 1, 10 * GB, 1.25 * GB, 0.6),
    )
}
"""By the name of --hardware. Of "cpu", the rates of two cores of a server."""
