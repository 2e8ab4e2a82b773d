"""The settings of a run that determine its memory, from the configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.devices import is_host
from megatron_ds.config.fields import in_effect
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.model.spec.architecture import Layer, ModelSpec, run_spec
from megatron_ds.model.spec.parts import FP32
from megatron_ds.model.stages import layers_per_stage, rank_layers

BLOCKWISE_8_BIT = 1 + FP32 / 256
"""Bytes of an element of an 8-bit moment, which has one scale for 256 elements."""
DTYPE_BYTES = {"fp32": FP32, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class MemoryInputs:
    """Settings of the engine that determine its memory. `*_bytes` are bytes per element."""

    zero_stage: int
    tp_size: int
    dp_size: int
    """Ranks over which states are partitioned, the sequence-parallel ones included."""
    param_bytes: int
    accumulation_bytes: int
    reduction_bytes: int
    moments: int
    """Optimizer state tensors per parameter: two for Adam, one for Lion and SGD with momentum."""
    moment_bytes: float = field(kw_only=True, default=FP32)
    """Of both moments in the mean."""
    second_moment_bytes: int = field(kw_only=True, default=FP32)
    matrix_states: int = field(kw_only=True, default=0)
    """State tensors of the matrices of the layers if these are updated as such; 0 if not."""
    zero: Mapping[str, Any]
    """DeepSpeed's `zero_optimization`: buckets, limits of gathering, swapping."""
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_fraction: float = 1.0
    """Fraction of the optimizer states that is offloaded."""
    master_bytes: int = FP32
    """Bytes per element of master weights and moments."""
    immediate_grad_update: bool = True
    """Stage 1 adds a bf16 gradient to its fp32 accumulator as soon as it is computed."""
    sp_size: int = 1
    """Sequence-parallel size."""
    is_bf16: bool = False
    on_cpu: bool = False
    """On a CPU, dropout saves its mask in the data type, and attention with dropout its scores."""

    @property
    def sums_in_place(self) -> bool:
        """Whether stage 1 sums bf16 gradients where they are accumulated, without a copy."""
        formats = self.is_bf16, self.accumulation_bytes, self.reduction_bytes
        is_stage_1 = self.zero_stage == 1 and not self.offload_optimizer
        return is_stage_1 and formats == (True, FP32, FP32)


def memory_inputs(config: Config, dp_size: int, device: str) -> MemoryInputs:
    """Derive the inputs of the estimate; `engine.readback` checks that the engine has them.

    Args:
        config: Complete configuration of the run.
        dp_size: Data-parallel size.
        device: Kind of device, such as "cpu".
    """
    ds_config, offload = build_ds_config(config, dp_size, device), config.deepspeed
    momentum = int(config.optimizer.sgd_momentum != 0)
    options = in_effect(config.optimizer)
    moments = {"adam": 2, "lion": 1, "muon": 2, "soap": 2, "sgd": momentum}[options.optimizer]
    first, second = (DTYPE_BYTES[n] for n in (options.exp_avg_dtype, options.exp_avg_sq_dtype))
    moment_bytes = first if moments == 1 else (first + second) / 2
    return MemoryInputs(
        zero_stage=config.zero_stage,
        tp_size=config.parallel.tensor_model_parallel_size,
        dp_size=dp_size * config.parallel.ds_sequence_parallel_size,
        param_bytes=DTYPE_BYTES[config.precision.name],
        accumulation_bytes=DTYPE_BYTES[ds_config["data_types"]["grad_accum_dtype"]],
        reduction_bytes=DTYPE_BYTES[ds_config["communication_data_type"]],
        moments=moments,
        moment_bytes=BLOCKWISE_8_BIT if config.optimizer.has_8_bit_moments else moment_bytes,
        second_moment_bytes=second,
        matrix_states=config.optimizer.matrix_states,
        zero=ds_config["zero_optimization"],
        offload_optimizer=offload.optimizer_offload != "none",
        offload_parameters=offload.param_offload != "none",
        offload_fraction=offload.optimizer_offload_fraction,
        master_bytes=2 if in_effect(config.precision).bf16_master_weights else FP32,
        immediate_grad_update=bool(ds_config["bf16"]["immediate_grad_update"]),
        sp_size=config.parallel.ds_sequence_parallel_size,
        is_bf16=config.precision.bf16,
        on_cpu=is_host(device),
    )


@dataclass(frozen=True)
class PlannedRun:
    """A run, and what the estimates of its memory, messages and time have in common."""

    config: Config
    """Complete configuration, with the vocabulary size."""
    inputs: MemoryInputs
    spec: ModelSpec
    stages: tuple[int, ...]
    """Transformer layers of each stage."""
    rank_layers: list[list[Layer]]
    """Layers of each pipeline rank."""
    micro_batches: int
    """Micro-batches of a step on each data-parallel rank, at the final batch size."""

    @classmethod
    def of(cls, config: Config, inputs: MemoryInputs) -> PlannedRun:
        """Derive the common values from the settings."""
        spec, dp_size = run_spec(config), inputs.dp_size // inputs.sp_size
        stages = layers_per_stage(config.model, config.parallel, config.moe)
        samples = config.final_global_batch_size(dp_size)
        count = max(1, samples // (config.schedule.micro_batch_size * dp_size))
        return cls(config, inputs, spec, stages, rank_layers(config), count)
