"""The settings of a run that determine its memory, from the configuration alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.devices import is_host
from megatron_ds.config.fields import in_effect
from megatron_ds.config.options.optimizer import OptimizerConfig
from megatron_ds.config.options.optimizer_specs import BLOCKWISE_8_BIT, State
from megatron_ds.dataclass import dataclass
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.model.declaration.architecture import Layer, ModelSpec, run_spec
from megatron_ds.model.declaration.forward_pass import FP32
from megatron_ds.model.declaration.fp8 import fp8_matrices
from megatron_ds.model.stages import layers_per_stage, rank_layers

DTYPE_BYTES = {"fp32": FP32, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class OptimizerBytes:
    """Memory of the states and the updates of an optimizer, in bytes per element."""

    count: int
    """State tensors of a weight that is not updated as a matrix."""
    states: float
    """Their bytes."""
    matrix_states: float | None = None
    """Bytes of the states of matrices of layers. None: they are not updated as matrices."""
    matrix_update: int = 0
    """Bytes of the tensors of a matrix that a rank sends to the owner of the matrix."""

    @classmethod
    def of(cls, options: OptimizerConfig, param_bytes: int) -> OptimizerBytes:
        """Derive the memory from the declaration of the optimizer.

        Args:
            options: Options of the optimizer.
            param_bytes: Bytes per element of the parameters.
        """
        options = in_effect(options)
        spec = options.spec
        sizes = _state_bytes(spec.states, options)
        if spec.matrices is None:
            return cls(len(sizes), sum(sizes))
        return cls(
            len(sizes),
            sum(sizes),
            sum(_state_bytes(spec.matrices.states, options)),
            spec.matrices.tensors * param_bytes + spec.matrices.fp32_tensors * FP32,
        )


def _state_bytes(states: Iterable[State], options: OptimizerConfig) -> list[float]:
    """Bytes per element of each state that there is."""
    sizes = []
    for state in states:
        if state.only_with is not None and not getattr(options, state.only_with):
            continue
        dtype = "fp32" if state.dtype is None else getattr(options, state.dtype)
        sizes.append(BLOCKWISE_8_BIT if state.is_8_bit else float(DTYPE_BYTES[dtype]))
    return sizes


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
    optimizer: OptimizerBytes
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
    ulysses_size: int = 1
    """Ulysses size: ranks that share the heads of a sequence inside attention."""
    sequence_ranks: int = 1
    """Ranks that have slices of the same sequences."""
    is_bf16: bool = False
    on_cpu: bool = False
    """Whether the run is on a CPU, where dropout saves its mask in the data type, and attention
    with dropout saves its scores."""

    @property
    def has_shared_masters(self) -> bool:
        """Whether the master weights are the parameters themselves."""
        return self.master_bytes == self.param_bytes == 2 and not self.offload_optimizer

    @property
    def sums_in_place(self) -> bool:
        """Whether stage 1 all-reduces bf16 gradients in the accumulation buffer, without a copy."""
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
    ds_config = build_ds_config(config, dp_size, device)
    offload = config.deepspeed
    param_bytes = DTYPE_BYTES[config.precision.name]
    return MemoryInputs(
        zero_stage=config.zero_stage,
        tp_size=config.parallel.tensor_model_parallel_size,
        dp_size=dp_size * config.parallel.sequence_ranks,
        param_bytes=param_bytes,
        accumulation_bytes=DTYPE_BYTES[ds_config["data_types"]["grad_accum_dtype"]],
        reduction_bytes=DTYPE_BYTES[ds_config["communication_data_type"]],
        optimizer=OptimizerBytes.of(config.optimizer, param_bytes),
        zero=ds_config["zero_optimization"],
        offload_optimizer=offload.optimizer_offload != "none",
        offload_parameters=offload.param_offload != "none",
        offload_fraction=offload.optimizer_offload_fraction,
        master_bytes=2 if in_effect(config.precision).bf16_master_weights else FP32,
        immediate_grad_update=bool(ds_config["bf16"]["immediate_grad_update"]),
        ulysses_size=config.parallel.ulysses_size,
        sequence_ranks=config.parallel.sequence_ranks,
        is_bf16=config.precision.bf16,
        on_cpu=is_host(device),
    )


@dataclass(frozen=True)
class PlannedRun:
    """A run, and the quantities that the estimates of its memory, communication and time share."""

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

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        tokens = self.config.schedule.micro_batch_size * self.config.model.seq_length
        return tokens // self.inputs.sequence_ranks

    @property
    def rounded_weights(self) -> dict[str, int]:
        """Bytes of weights in fp8 that are kept during the forward and backward passes of a step.

        Each is kept twice, since its two products need other rows. At stage 3 none is kept.
        """
        config = self.config
        if config.precision.fp8_format is None or self.inputs.zero_stage == 3:
            return {}
        sizes = self.inputs.tp_size, config.expert_parallel_size
        is_whole = config.has_whole_experts
        elements = max(
            sum(
                weight.size(*sizes, has_whole_experts=is_whole)
                for weight in fp8_matrices(config, layers)
            )
            for layers in self.rank_layers
        )
        return {"weights in fp8": 2 * elements}

    @classmethod
    def of(cls, config: Config, inputs: MemoryInputs) -> PlannedRun:
        """Derive the common values from the settings."""
        spec = run_spec(config)
        dp_size = inputs.dp_size // inputs.sequence_ranks
        stages = layers_per_stage(config.model, config.parallel, config.moe)
        samples = config.final_global_batch_size(dp_size)
        count = max(1, samples // (config.schedule.micro_batch_size * dp_size))
        return cls(config, inputs, spec, stages, rank_layers(config), count)
