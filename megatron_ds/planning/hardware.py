"""Devices for which a run can be planned: data-sheet peaks, and the fraction that runs reach.

The peaks are for dense matmuls, from the vendors' data sheets. `share`,
`attention`, `passes`, `grouped` and `contention` are fitted to half of the public runs of
benchmarks/public_runs.yaml by benchmarks/public_runs.py; latencies are from NCCL's model of rings
with 16-bit data (src/graph/tuning.cc). The machines' memory and storage, and the time of launches,
are assumptions.
"""

from __future__ import annotations

from megatron_ds.config.data_files import read_table
from megatron_ds.config.devices import HOST
from megatron_ds.dataclass import dataclass

GB = 1e9
DEFAULT = "h100"
TABLES = read_table(__file__)
FITTED = ("h100", "h200", "a100")
"""Devices whose share of the peak was fitted to public runs."""


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
    tflops_8: float = 0.0
    """10^12 operations per second in fp8. 0: it multiplies in 16 bits, or by an unknown rate."""
    share: float = 0.5
    """Fraction of the peak that matmuls reach, without other kernels."""
    passes: float = 0.0
    """Passes over the memory for each byte that a layer saves for the backward pass, and for each
    byte of the logits: kernels besides matmuls are as slow as the memory."""
    attention: float = 1.0
    """Rate of the products of attention's scores, with all keys counted, relative to that of other
    products. Kernels compute half of them behind a causal mask."""
    grouped: float = 1.0
    """Rate of the products of experts relative to that of other products: each has few rows."""
    contention: float = 0.0
    """Fraction of the time of messages behind computation by which they delay it."""
    efficiency: float = 0.0
    """Fraction of the peak that matmuls and all other kernels reach together, if it is given:
    instead of `share` and `passes`."""
    latency_inside: float = 3.4e-6
    """Seconds of a step of a ring inside a machine."""
    latency_between: float = 14e-6
    """Seconds of a step of a ring between machines."""
    kernels: float = 2e-4
    """Seconds that a layer takes at least for each micro-batch: the launches of its kernels."""
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

    @property
    def efficiency_origin(self) -> str:
        """Where the share of the peak comes from."""
        if self.efficiency:
            return "given"
        is_fitted = self.name in FITTED and self.tflops_16 == HARDWARE[self.name].tflops_16
        return "fitted to public runs" if is_fitted else "assumed"

    @property
    def fp8_operations(self) -> float:
        """Time of an operation in fp8 relative to that of one in 16 bits."""
        return self.tflops_16 / self.tflops_8 if self.tflops_8 else 1.0

    def tflops(self, precision: str) -> float:
        """The peak in a number format."""
        return self.tflops_32 if precision == "fp32" else self.tflops_16


HARDWARE = {name: Hardware(name, **rates) for name, rates in TABLES["devices"].items()}
"""Devices by the name that --hardware takes."""
