"""The settings in effect of an engine, as they are read back and shown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LossScaleSettings:
    """Loss scaling of fp16."""

    scale: float
    """Static scale, or the first one of a dynamic scale."""
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
    """Ranks over which gradients are averaged, the sequence-parallel ones included."""
    accumulation_steps: int
    """Micro-batches of each data-parallel rank per step, at the final batch size."""
    optimizer: str
    """Class of the optimizer, and whether it is the fused kernel."""
    betas: tuple[float, ...] | None
    """Decay rates of the averages, of AdamW in an optimizer of matrices; None without them."""
    epsilon: tuple[float, ...] | None
    """Epsilon of AdamW of each parameter group, also in an optimizer of matrices; None without
    AdamW."""
    momentum: float | None
    """Momentum, for example of SGD or Muon; None for an optimizer without one."""
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
    moment_dtypes: tuple[str, ...] = ()
    """Types of first and second moments; empty if they have the type of the master weights."""
    matrices: int | None = None
    """Parameters that are updated as matrices; None if the optimizer updates none as such."""
    hpz_size: int = 1
    """Ranks that share a second copy of the parameters (hpZ); 1 without one."""
    passed_keys: tuple[str, ...] = ()
    """Keys of `engine.ds_config.passthrough.PASSED` that are in effect."""
