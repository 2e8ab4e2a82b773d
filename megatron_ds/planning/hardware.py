"""Devices for which a run can be planned: data-sheet peaks, and the fraction that runs reach.

The peaks are for dense matmuls, from the vendors' data sheets. `efficiency`, the fraction of the
peak that matmuls reach, is from published runs unless it is given; latencies are from NCCL's model
of rings with 16-bit data (src/graph/tuning.cc). The machines' memory and storage, and the time of
other kernels, are assumptions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_ds.config.data_files import read_table
from megatron_ds.config.devices import HOST

GB = 1e9
DEFAULT = "h100"
TABLES = read_table(__file__)
SHARES: dict[str, list[tuple[float, float]]] = TABLES["shares"]
"""Parameters and share of the peak, from the runs that docs/running/planning.md lists."""
MEASURED: dict[str, float] = TABLES["measured"]
"""Parameters up to which the share was measured with this program."""


@dataclass(frozen=True)
class Hardware:
    """A kind of device in machines of several. Bandwidths are per device and direction."""

    name: str
    tflops_16: float
    """10^12 operations per second in bf16 and fp16."""
    tflops_32: float
    """10^12 operations per second in fp32, without TF32."""
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
    efficiency: float = 0.0
    """Fraction of the peak that matmuls reach. 0: the value of `SHARES`."""
    latency_inside: float = 3.4e-6
    """Seconds of a step of a ring inside a machine."""
    latency_between: float = 14e-6
    """Seconds of a step of a ring between machines."""
    kernels: float = 2e-4
    """Seconds per layer and micro-batch outside of matmuls: kernel launches and memory traffic."""
    host: float = 25 * GB
    """Bytes per second between a device and the memory of its machine."""
    host_memory: float = 250 * GB
    """Bytes of the machine's memory for each device."""
    storage: float = 2 * GB
    """Bytes per second that a machine writes to the file system of checkpoints."""

    @property
    def kind(self) -> str:
        """Kind of device for kernels and DeepSpeed's defaults: a CPU or another device."""
        return HOST if self.name == HOST else "accelerator"

    def share(self, parameters: float) -> tuple[float, str]:
        """Fraction of the peak that a model with `parameters` active parameters reaches, and the
        origin of this value."""
        if self.efficiency:
            return self.efficiency, "given"
        sizes, shares = zip(*SHARES[self.name], strict=True)
        is_measured = parameters <= MEASURED.get(self.name, 0)
        share = float(np.interp(math.log(parameters), np.log(sizes), shares))
        return share, "measured on one device" if is_measured else "assumed"

    def tflops(self, precision: str) -> float:
        """The peak in a number format."""
        return self.tflops_32 if precision == "fp32" else self.tflops_16


HARDWARE = {name: Hardware(name, **rates) for name, rates in TABLES["devices"].items()}
"""Devices by the name that --hardware takes."""
