"""The settings that a built engine has in effect, as plain values for reports and estimates.

Values only: how they are read from DeepSpeed is in `readback`.
"""

from __future__ import annotations

from dataclasses import dataclass

ON_DEVICE, ON_HOST = "device", "host"
StateBytes = dict[str, dict[str, int]]
"""ON_DEVICE or ON_HOST -> kind of state -> bytes of this process."""


@dataclass(frozen=True)
class LossScaleSettings:
    """Loss scaling of fp16."""

    scale: float
    """Static scale, or the initial one of a dynamic scale."""
    window: int | None = None
    """Steps without an overflow after which a dynamic scale is raised; None for a static scale."""
    hysteresis: int = 1
    minimum: float = 1.0

    def __str__(self) -> str:
        if self.window is None:
            return f"static {self.scale:g}"
        return (
            f"dynamic from {self.scale:g}, window {self.window}, hysteresis {self.hysteresis}, "
            f"at least {self.minimum:g}"
        )


@dataclass(frozen=True)
class EngineSettings:
    """Settings in effect. Data types are names such as "float32"; devices "none", "cpu", "nvme"."""

    zero_stage: int
    dp_size: int
    accumulation_steps: int
    """Micro-batches of each data-parallel rank per step, at the final batch size."""
    optimizer: str
    """Class of the optimizer, and whether it is the fused kernel."""
    weight_decay: tuple[float, ...]
    """Weight decay of each parameter group."""
    clip_grad: float
    param_dtype: str
    accumulation_dtype: str
    """Type in which gradients of micro-batches are summed."""
    reduction_dtype: str
    """Type in which gradients are averaged over data-parallel ranks."""
    master_dtype: str
    """Type of the master weights and of the optimizer states."""
    optimizer_offload: str
    param_offload: str
    loss_scale: LossScaleSettings | None
    """None without fp16."""
