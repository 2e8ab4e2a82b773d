"""Memory of a training process, estimated from the configuration before anything is built.

States are counted as DeepSpeed's engines keep them, activations as torch's autograd saves them for
this model (`tests/unit/engine/test_memory_estimate.py` counts both). The estimate is the
peak over the phases of a step. It excludes the libraries themselves, allocator fragmentation and
the buffers of communication libraries.

Shapes: T tokens of a micro-batch, H hidden, P parameters of this tensor-parallel rank, N the
data-parallel size, v this rank's rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ds.config import Config, ModelConfig
from megatron_ds.engine.settings import EngineSettings
from megatron_ds.model.flops import parameters_per_rank
from megatron_ds.parallel.fused_linear_cross_entropy import CHUNK_BYTES

ALLREDUCE_BUCKET = 500_000_000
"""Elements that DeepSpeed copies into one message if it has no bucket."""
MALLOC_TRIM_LIMIT = 2**25
"""Bytes below which the C library may keep a freed block."""
FP32 = 4
"""Bytes of an element in fp32."""
DTYPE_BYTES = {"float32": FP32, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryInputs:
    """Settings of the engine that determine its memory. `*_bytes` are bytes per element."""

    zero_stage: int
    tp_size: int
    dp_size: int
    param_bytes: int
    accumulation_bytes: int
    reduction_bytes: int
    moments: int
    """Optimizer state tensors per parameter: two for Adam, one for SGD with momentum."""
    bucket_elements: int
    """reduce_bucket_size."""
    num_buckets: int = 1
    """Two with overlap_comm, and under ZeRO-3, which scatters a bucket from a copy of it."""
    offload_optimizer: bool = False
    offload_parameters: bool = False
    on_cpu: bool = False
    """On a CPU, dropout saves its mask in the data type, and attention with dropout its scores."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process in bytes, by purpose."""

    device: dict[str, int] = field(default_factory=dict)
    """States on the device, gradients included."""
    host: dict[str, int] = field(default_factory=dict)
    """States in host memory."""
    activations: int = 0
    """Saved for the backward pass of one micro-batch by all layers, without the output layer."""
    head: int = 0
    """Logits, loss and their gradients."""
    reduction: int = 0
    """Buckets and copies during gradient reduction and optimizer step."""
    gathered: int = 0
    """ZeRO-3: parameters that are gathered at a time."""
    phases: dict[str, int] = field(default_factory=dict)
    """Phase of a step -> memory of the device."""

    @property
    def states(self) -> int:
        """States on the device."""
        return sum(self.device.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> int:
        """Peak memory of the device."""
        return self.phases[self.peak_phase]


def memory_inputs(
    config: Config, settings: EngineSettings, zero: Mapping[str, Any], tp_size: int, device: str
) -> MemoryInputs:
    """Derive the inputs of the estimate from an engine.

    Args:
        config: Complete configuration of the run.
        settings: Settings of the engine in effect.
        zero: Block `zero_optimization` of the DeepSpeed configuration.
        tp_size: Tensor-parallel size.
        device: Kind of device, such as "cpu".
    """
    moments = 2 if config.optimizer.optimizer == "adam" else int(config.optimizer.sgd_momentum != 0)
    return MemoryInputs(
        zero_stage=settings.zero_stage,
        tp_size=tp_size,
        dp_size=settings.dp_size,
        param_bytes=DTYPE_BYTES[settings.param_dtype],
        accumulation_bytes=DTYPE_BYTES[settings.accumulation_dtype],
        reduction_bytes=DTYPE_BYTES[settings.reduction_dtype],
        moments=moments,
        bucket_elements=int(zero["reduce_bucket_size"]),
        num_buckets=2 if zero.get("overlap_comm") or settings.zero_stage == 3 else 1,
        offload_optimizer=settings.optimizer_offload != "none",
        offload_parameters=settings.param_offload != "none",
        on_cpu=device == "cpu",
    )


def estimate(config: Config, inputs: MemoryInputs) -> MemoryEstimate:
    """Estimate the memory of one process.

    Args:
        config: Complete configuration, with the vocabulary size.
        inputs: Settings of the engine.
    """
    device, host = _states(config, inputs)
    activations, head = _activations(config, inputs), _Head(config, inputs)
    reduction, gathered = _reduction(config, inputs), _gathered(config, inputs)
    bucket = _bucket(config, inputs)
    states = sum(device.values())
    forward = (
        states - _not_yet_allocated(config, inputs, device) + gathered + activations + head.kept
    )
    return MemoryEstimate(
        device=device,
        host=host,
        activations=activations,
        head=head.kept + max(head.logits, head.scaled),
        reduction=reduction,
        gathered=gathered,
        phases={
            "loss": forward + head.logits + (bucket if inputs.zero_stage == 3 else 0),
            "start of the backward pass": forward + head.scaled + inputs.num_buckets * bucket,
            "gradient reduction": states
            + gathered
            + reduction
            + _retained_by_malloc(config, inputs, activations),
        },
    )


def _not_yet_allocated(config: Config, inputs: MemoryInputs, device: dict[str, int]) -> int:
    """States on the device that do not exist before the backward pass.

    Gradients exist until the step, or until they are accumulated; accumulation starts with the
    second micro-batch, unless DeepSpeed keeps its buffer.
    """
    is_single = config.final_global_batch_size(inputs.dp_size) == inputs.dp_size * (
        config.schedule.micro_batch_size
    )
    has_accumulator = inputs.param_bytes != inputs.accumulation_bytes
    absent = device.get("gradients", 0) if is_single or has_accumulator else 0
    if is_single and inputs.zero_stage == 2:
        absent += device.get("accumulated gradients", 0)
    return absent


def _states(config: Config, inputs: MemoryInputs) -> tuple[dict[str, int], dict[str, int]]:
    """States on the device and on the host."""
    full = parameters_per_rank(config.model, inputs.tp_size)
    partition = -(-full // inputs.dp_size)
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    optimizer = host if inputs.offload_optimizer else device
    parameters = host if inputs.offload_parameters else device
    parameters["parameters"] = inputs.param_bytes * (partition if inputs.zero_stage == 3 else full)
    if inputs.zero_stage == 0:
        device["gradients"] = inputs.param_bytes * full
        device["moments"] = inputs.moments * FP32 * full
        return device, host
    if inputs.zero_stage == 1:
        device["gradients"] = inputs.param_bytes * full
        if inputs.param_bytes != inputs.accumulation_bytes:
            # Gradients of one micro-batch, until they are accumulated in fp32.
            device["accumulated gradients"] = inputs.accumulation_bytes * full
    else:
        optimizer["accumulated gradients"] = inputs.accumulation_bytes * partition
    optimizer["master weights"] = FP32 * partition
    optimizer["moments"] = inputs.moments * FP32 * partition
    if inputs.offload_optimizer and inputs.zero_stage < 3:
        host["copies for the device"] = inputs.param_bytes * partition
    return device, host


def _reduction(config: Config, inputs: MemoryInputs) -> int:
    full = parameters_per_rank(config.model, inputs.tp_size)
    partition = -(-full // inputs.dp_size)
    if not _has_bucket(inputs):
        return inputs.reduction_bytes * min(full, ALLREDUCE_BUCKET)  # flattened into one message
    # The optimizer steps on a flat copy of its partition.
    step = 0 if inputs.offload_optimizer else FP32 * partition
    buckets = inputs.num_buckets * _bucket(config, inputs)
    return max(buckets, step) if inputs.zero_stage < 3 else buckets + step


def _bucket(config: Config, inputs: MemoryInputs) -> int:
    """Bucket allocated when the backward pass starts, under ZeRO-3 once for the whole run."""
    if not _has_bucket(inputs):
        return 0
    return inputs.reduction_bytes * min(
        inputs.bucket_elements, parameters_per_rank(config.model, inputs.tp_size)
    )


def _has_bucket(inputs: MemoryInputs) -> bool:
    """Whether gradients are reduced in buckets: not at stage 0 and by BF16_Optimizer."""
    has_accumulator = inputs.param_bytes != inputs.accumulation_bytes
    return inputs.zero_stage > 1 or (
        inputs.zero_stage == 1 and (not has_accumulator or inputs.offload_optimizer)
    )


def _retained_by_malloc(config: Config, inputs: MemoryInputs, activations: int) -> int:
    """Activations that are freed but that malloc does not return to the system."""
    tokens = config.schedule.micro_batch_size * config.model.seq_length
    block = tokens * config.model.mlp_hidden_size * inputs.param_bytes // inputs.tp_size
    return activations if inputs.on_cpu and block < MALLOC_TRIM_LIMIT else 0


def _gathered(config: Config, inputs: MemoryInputs) -> int:
    """ZeRO-3 keeps gathered parameters for the backward pass, up to max_reuse_distance."""
    if inputs.zero_stage != 3:
        return 0
    return inputs.param_bytes * parameters_per_rank(config.model, inputs.tp_size)


def _activations(config: Config, inputs: MemoryInputs) -> int:
    model, recompute = config.model, config.recompute
    tokens = config.schedule.micro_batch_size * model.seq_length
    stream = tokens * model.hidden_size * inputs.param_bytes
    # Without flex attention, attention runs document by document.
    per_document = config.data.reset_attention_mask and (
        inputs.on_cpu or model.attention_dropout > 0
    )
    layer = _layer(
        model,
        inputs,
        tokens,
        core=recompute.recompute_granularity != "selective",
        per_document=per_document,
    )
    ends = stream + _norm(model, inputs, tokens)  # the final norm
    if model.hidden_dropout > 0:
        ends += _mask(inputs, stream)
    if model.position_embedding_type == "alibi":
        ends += (
            model.num_attention_heads // inputs.tp_size * model.seq_length**2 * inputs.param_bytes
        )
    if recompute.recompute_granularity != "full":
        return ends + model.num_layers * layer
    units = -(-model.num_layers // recompute.checkpoint_num_layers)
    kept = 0 if recompute.checkpoint_in_cpu else units * stream
    if recompute.partition_activations:
        kept //= inputs.tp_size
    return ends + kept + min(recompute.checkpoint_num_layers, model.num_layers) * layer


def _layer(
    model: ModelConfig, inputs: MemoryInputs, tokens: int, *, core: bool, per_document: bool
) -> int:
    """Bytes that autograd saves for one layer.

    Args:
        core: Whether the attention core saves its tensors.
        per_document: Whether attention runs document by document; estimated for samples of one
            document.
    """
    size = tokens * inputs.param_bytes
    stream = size * model.hidden_size
    q, kv = (
        n * model.head_dim // inputs.tp_size for n in (model.num_attention_heads, model.kv_heads)
    )
    saved = 4 * stream  # inputs of both norms and of the projections after them
    saved += size * (q + 2 * kv)  # projected queries, keys and values
    fused = _fused(model, inputs)
    if per_document and core and fused:
        saved += size * q  # outputs of attention per document, before they are concatenated
    elif model.position_embedding_type == "rope" and (fused or not core):
        saved += size * (q + kv)  # otherwise counted with the scores
    saved += size * q  # output of attention, input of the output projection
    inner = 2 if not model.is_gated else 3 if model.activation == "liglu" else 4
    saved += size * model.mlp_hidden_size // inputs.tp_size * inner
    if model.hidden_dropout > 0:
        saved += 2 * _mask(inputs, stream)
    saved += 2 * _norm(model, inputs, tokens)
    return saved + (_core(model, inputs, tokens) if core else 0)


def _norm(model: ModelConfig, inputs: MemoryInputs, tokens: int) -> int:
    """Saved by a norm in addition to its input and output.

    On a CPU torch composes RMSNorm of several operations.
    """
    if model.normalization == "LayerNorm":
        return 2 * tokens * FP32
    intermediate = 0
    if inputs.on_cpu:
        in_fp32 = FP32 if inputs.param_bytes < FP32 else 0
        intermediate = tokens * model.hidden_size * (inputs.param_bytes + in_fp32)
    return tokens * FP32 + intermediate


def _fused(model: ModelConfig, inputs: MemoryInputs) -> bool:
    """Whether attention is a fused kernel, which saves no scores."""
    plain = model.attention_dropout == 0 and model.position_embedding_type != "alibi"
    return plain or not inputs.on_cpu


def _core(model: ModelConfig, inputs: MemoryInputs, tokens: int) -> int:
    """Saved by the attention core in addition to its inputs and output.

    On a CPU torch has no fused kernel for dropout or a bias and saves the scores in fp32.
    """
    heads = model.num_attention_heads // inputs.tp_size
    if _fused(model, inputs):
        return tokens * heads * FP32
    dropped = model.attention_dropout > 0
    scores = tokens * model.seq_length * heads * FP32
    copies = 3 * tokens * heads * model.head_dim * inputs.param_bytes
    return scores * (3 if dropped else 1) + (copies if inputs.param_bytes < FP32 else 0)


def _mask(inputs: MemoryInputs, stream: int) -> int:
    """Mask of dropout over the hidden states: in the data type on a CPU, else one byte each."""
    return stream if inputs.on_cpu else stream // inputs.param_bytes


class _Head:
    """Output layer and loss: gradients of input and weight, and a chunk of logits."""

    def __init__(self, config: Config, inputs: MemoryInputs) -> None:
        model, element = config.model, inputs.param_bytes
        tokens = config.schedule.micro_batch_size * model.seq_length
        rows = model.padded_vocab(inputs.tp_size) // inputs.tp_size
        table, logits = rows * model.hidden_size, tokens * rows * element
        self.kept = tokens * model.hidden_size * element
        self.kept += table * (FP32 if logits > CHUNK_BYTES else element)
        self.logits = min(logits, CHUNK_BYTES)
        if not inputs.on_cpu:
            self.logits += self.logits // element * FP32  # the softmax before rounding
        # The gradient is scaled in fp32: a copy, the product and the rounded result.
        self.scaled = table * (FP32 if element == FP32 else 2 * FP32 + element)
