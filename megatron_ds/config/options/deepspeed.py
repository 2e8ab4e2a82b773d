"""Options of DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.config.checks import file_problems
from megatron_ds.config.devices import HOST, OFFLOAD_TARGETS
from megatron_ds.config.fields import Decides, in_effect, option_field, when
from megatron_ds.config.problems import Problem
from megatron_ds.dataclass import dataclass


@dataclass(frozen=True)
class DeepSpeedConfig:
    """DeepSpeed. Keys of the --deepspeed_config file set options whose flags are not given."""

    DECIDES = Decides.LAYOUT

    deepspeed_config: str | None = option_field(
        None, flag="deepspeed_config", metavar="FILE", common=True
    )
    """DeepSpeed JSON configuration file."""
    zero_stage: int | None = option_field(None, minimum=0, maximum=3, common=True)
    """ZeRO stage: 0 partitions nothing; 1 optimizer states; 2 gradients, too; 3 parameters, too
    (default: 1)."""
    cpu_optimizer: bool = option_field(False, aliases=("optimizer-cpu-offload",))
    """Offload optimizer states to host memory (offload_optimizer: cpu)."""
    nvme_optimizer: bool = option_field(False)
    """Offload optimizer states to the disk of --nvme-path (offload_optimizer: nvme)."""
    optimizer_offload_fraction: float = option_field(
        1.0,
        minimum=0,
        maximum=1,
        only_with=(when(zero_stage=3), when(cpu_optimizer=True, nvme_optimizer=True)),
    )
    """Fraction of the offloaded optimizer states that leaves the device, at ZeRO-3 (ratio)."""
    remote_device: str = option_field("none", choices=OFFLOAD_TARGETS, only_with=when(zero_stage=3))
    """Offload ZeRO-3 parameters (offload_param)."""
    nvme_path: str | None = option_field(
        None, metavar="DIR", only_with=when(nvme_optimizer=True, remote_device="nvme")
    )
    """Folder on a local disk for what is offloaded to nvme (nvme_path)."""
    zero_hpz_partition_size: int = option_field(1, minimum=1, only_with=when(zero_stage=3))
    """data-parallel ranks among which ZeRO-3 gathers parameters for the backward pass, such as
    those of one machine, which hold a second copy of them."""

    @property
    def optimizer_offload(self) -> str:
        """Device of offloaded optimizer states: "none", "cpu" or "nvme"."""
        return "nvme" if self.nvme_optimizer else HOST if self.cpu_optimizer else "none"

    @property
    def uses_nvme(self) -> bool:
        return "nvme" in (self.optimizer_offload, self.param_offload)

    @property
    def param_offload(self) -> str:
        """Device of offloaded parameters: "none", "cpu" or "nvme"; "none" except at ZeRO-3."""
        return in_effect(self).remote_device

    def problems(self) -> Iterator[Problem]:
        if self.deepspeed_config is not None:
            yield from file_problems("deepspeed_config", self.deepspeed_config)
