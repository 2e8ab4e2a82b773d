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
"""Elements that DeepSpeed copies into one message where it has no bucket of its own."""
MALLOC_TRIM_LIMIT = 2**25
"""Bytes below which the C library may keep a freed block for itself."""
FP32 = 4
"""Bytes of an element in fp32."""
DTYPE_BYTES = {"float32": FP32, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class MemoryInputs:
    """What of the engine decides how much memory it takes. Sizes are in bytes per element."""

    stage: int
    tp: int
    dp: int
    parameter: int
    accumulation: int
    reduction: int
    moments: int
    """Tensors of the optimizer per parameter: two of Adam, one of SGD with momentum."""
    bucket: int
    """Elements of reduce_bucket_size."""
    buckets: int = 1
    """Two with overlap_comm; and under ZeRO-3, which scatters a bucket from a copy of it."""
    offload_optimizer: bool = False
    offload_parameters: bool = False
    on_cpu: bool = False
    """The device is a CPU: dropout keeps its mask as numbers, attention with dropout its scores."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process, by what they are for."""

    device: dict[str, int] = field(default_factory=dict)
    """States on the device, gradients among them."""
    host: dict[str, int] = field(default_factory=dict)
    """States that are kept in the host's memory."""
    activations: int = 0
    """Saved for the backward pass of one micro-batch, all layers together, without the head."""
    head: int = 0
    """Logits, loss and their gradients."""
    reduction: int = 0
    """Buckets and copies while gradients are reduced and the optimizer steps."""
    gathered: int = 0
    """ZeRO-3: whole parameters that are there at a time."""
    phases: dict[str, int] = field(default_factory=dict)
    """Phase of a step, in words -> all that is on the device then."""

    @property
    def states(self) -> int:
        """On the device."""
        return sum(self.device.values())

    @property
    def peak_phase(self) -> str:
        """The phase of the peak."""
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> int:
        """Of the device."""
        return self.phases[self.peak_phase]


def memory_inputs(
    config: Config, settings: EngineSettings, zero: Mapping[str, Any], tp_size: int, device: str
) -> MemoryInputs:
    """What the estimate needs of an engine.

    Args:
        config: Complete configuration of the run.
        settings: Settings of the engine in effect.
        zero: Block `zero_optimization` of the DeepSpeed configuration.
        tp_size: Tensor-parallel size.
        device: Kind of device, such as "cpu".
    """
    moments = 2 if config.optimizer.optimizer == "adam" else int(config.optimizer.sgd_momentum != 0)
    return MemoryInputs(
        stage=settings.zero_stage,
        tp=tp_size,
        dp=settings.dp_size,
        parameter=DTYPE_BYTES[settings.param_dtype],
        accumulation=DTYPE_BYTES[settings.accumulation_dtype],
        reduction=DTYPE_BYTES[settings.reduction_dtype],
        moments=moments,
        bucket=int(zero["reduce_bucket_size"]),
        buckets=2 if zero.get("overlap_comm") or settings.zero_stage == 3 else 1,
        offload_optimizer=settings.optimizer_offload != "none",
        offload_parameters=settings.param_offload != "none",
        on_cpu=device == "cpu",
    )


def estimate(config: Config, engine: MemoryInputs) -> MemoryEstimate:
    """The memory of a run whose configuration is complete (its vocabulary known)."""
    device, host = _states(config, engine)
    activations, head = _activations(config, engine), _Head(config, engine)
    reduction, gathered = _reduction(config, engine), _gathered(config, engine)
    bucket = _bucket(config, engine)
    states = sum(device.values())
    forward = (
        states - _not_yet_allocated(config, engine, device) + gathered + activations + head.kept
    )
    return MemoryEstimate(
        device=device,
        host=host,
        activations=activations,
        head=head.kept + max(head.logits, head.scaled),
        reduction=reduction,
        gathered=gathered,
        phases={
            "in the loss": forward + head.logits + (bucket if engine.stage == 3 else 0),
            "as the backward pass begins": forward + head.scaled + engine.buckets * bucket,
            "as gradients are reduced": states
            + gathered
            + reduction
            + _retained_by_malloc(config, engine, activations),
        },
    )


def _not_yet_allocated(config: Config, engine: MemoryInputs, device: dict[str, int]) -> int:
    """States that are not there before the backward pass.

    Gradients live until the step, or until they are added to a sum; and a sum begins with its
    second micro-batch, unless DeepSpeed keeps its buffer.
    """
    once = config.final_global_batch_size(engine.dp) == engine.dp * (
        config.schedule.micro_batch_size
    )
    summed_apart = engine.parameter != engine.accumulation
    absent = device.get("gradients", 0) if once or summed_apart else 0
    if once and engine.stage == 2:
        absent += device.get("accumulated gradients", 0)
    return absent


def _states(config: Config, engine: MemoryInputs) -> tuple[dict[str, int], dict[str, int]]:
    """States on the device, and on the host."""
    whole = parameters_per_rank(config.model, engine.tp)
    cut = -(-whole // engine.dp)
    device: dict[str, int] = {}
    host: dict[str, int] = {}
    optimizer = host if engine.offload_optimizer else device
    parameters = host if engine.offload_parameters else device
    parameters["parameters"] = engine.parameter * (cut if engine.stage == 3 else whole)
    if engine.stage == 0:
        device["gradients"] = engine.parameter * whole
        device["moments"] = engine.moments * FP32 * whole
        return device, host
    if engine.stage == 1:
        device["gradients"] = engine.parameter * whole
        if engine.parameter != engine.accumulation:
            # The former are those of a micro-batch, until they are added to the sum in fp32.
            device["accumulated gradients"] = engine.accumulation * whole
    else:
        optimizer["accumulated gradients"] = engine.accumulation * cut
    optimizer["master weights"] = FP32 * cut
    optimizer["moments"] = engine.moments * FP32 * cut
    if engine.offload_optimizer and engine.stage < 3:
        host["copies for the device"] = engine.parameter * cut
    return device, host


def _reduction(config: Config, engine: MemoryInputs) -> int:
    whole = parameters_per_rank(config.model, engine.tp)
    cut = -(-whole // engine.dp)
    if not _has_bucket(engine):
        return engine.reduction * min(whole, ALLREDUCE_BUCKET)  # flattened into one message
    # The optimizer steps on a flat copy of its share.
    step = 0 if engine.offload_optimizer else FP32 * cut
    buckets = engine.buckets * _bucket(config, engine)
    return max(buckets, step) if engine.stage < 3 else buckets + step


def _bucket(config: Config, engine: MemoryInputs) -> int:
    """Taken when the backward pass begins, and under ZeRO-3 once and for all."""
    if not _has_bucket(engine):
        return 0
    return engine.reduction * min(engine.bucket, parameters_per_rank(config.model, engine.tp))


def _has_bucket(engine: MemoryInputs) -> bool:
    """Stage 0, and DeepSpeed's optimizer for bf16 at stage 1, have none."""
    apart = engine.parameter != engine.accumulation
    return engine.stage > 1 or (engine.stage == 1 and (not apart or engine.offload_optimizer))


def _retained_by_malloc(config: Config, engine: MemoryInputs, activations: int) -> int:
    """Freed activations that a CPU's process keeps all the same."""
    tokens = config.schedule.micro_batch_size * config.model.seq_length
    block = tokens * config.model.mlp_hidden_size * engine.parameter // engine.tp
    return activations if engine.on_cpu and block < MALLOC_TRIM_LIMIT else 0


def _gathered(config: Config, engine: MemoryInputs) -> int:
    """Below max_reuse_distance DeepSpeed keeps what it gathered for the backward pass."""
    if engine.stage != 3:
        return 0
    return engine.parameter * parameters_per_rank(config.model, engine.tp)


def _activations(config: Config, engine: MemoryInputs) -> int:
    model, recompute = config.model, config.recompute
    tokens = config.schedule.micro_batch_size * model.seq_length
    stream = tokens * model.hidden_size * engine.parameter
    # Where flex attention does not serve, each document is attended to by itself.
    apart = config.data.reset_attention_mask and (engine.on_cpu or model.attention_dropout > 0)
    layer = _layer(
        model,
        engine,
        tokens,
        core=recompute.recompute_granularity != "selective",
        per_document=apart,
    )
    ends = stream + _norm(model, engine, tokens)  # the last norm, which the head follows
    if model.hidden_dropout > 0:
        ends += _mask(engine, stream)
    if model.position_embedding_type == "alibi":
        ends += model.num_attention_heads // engine.tp * model.seq_length**2 * engine.parameter
    if recompute.recompute_granularity != "full":
        return ends + model.num_layers * layer
    units = -(-model.num_layers // recompute.checkpoint_num_layers)
    kept = 0 if recompute.checkpoint_in_cpu else units * stream
    if recompute.partition_activations:
        kept //= engine.tp
    return ends + kept + min(recompute.checkpoint_num_layers, model.num_layers) * layer


def _layer(
    model: ModelConfig, engine: MemoryInputs, tokens: int, *, core: bool, per_document: bool
) -> int:
    """Bytes that autograd saves for one layer. core: attention's own are among them, if
    per_document as much as a sample that is one document needs.
    """
    size = tokens * engine.parameter
    stream = size * model.hidden_size
    q, kv = (n * model.head_dim // engine.tp for n in (model.num_attention_heads, model.kv_heads))
    saved = 4 * stream  # inputs of both norms, and of the projections behind them
    saved += size * (q + 2 * kv)  # queries, keys and values as they are projected
    fused = _fused(model, engine)
    if per_document and core and fused:
        saved += size * q  # what attention gives for each document, before it is put together
    elif model.position_embedding_type == "rope" and (fused or not core):
        saved += size * (q + kv)  # where scores are kept, attention's copies are counted with them
    saved += size * q  # what attention gives, and the output projection takes
    inner = 2 if not model.is_gated else 3 if model.activation == "liglu" else 4
    saved += size * model.mlp_hidden_size // engine.tp * inner
    if model.hidden_dropout > 0:
        saved += 2 * _mask(engine, stream)
    saved += 2 * _norm(model, engine, tokens)
    return saved + (_core(model, engine, tokens) if core else 0)


def _norm(model: ModelConfig, engine: MemoryInputs, tokens: int) -> int:
    """Beside its input and output. On a CPU torch puts RMSNorm together of several operations."""
    if model.normalization == "LayerNorm":
        return 2 * tokens * FP32
    apart = 0
    if engine.on_cpu:
        in_fp32 = FP32 if engine.parameter < FP32 else 0
        apart = tokens * model.hidden_size * (engine.parameter + in_fp32)
    return tokens * FP32 + apart


def _fused(model: ModelConfig, engine: MemoryInputs) -> bool:
    """Whether attention is one kernel, which keeps its output and no scores."""
    plain = model.attention_dropout == 0 and model.position_embedding_type != "alibi"
    return plain or not engine.on_cpu


def _core(model: ModelConfig, engine: MemoryInputs, tokens: int) -> int:
    """Of attention, beside its inputs and output.

    On a CPU torch has no fused kernel for dropout or a bias: it keeps the scores, in fp32.
    """
    heads = model.num_attention_heads // engine.tp
    if _fused(model, engine):
        return tokens * heads * FP32
    dropped = model.attention_dropout > 0
    scores = tokens * model.seq_length * heads * FP32
    copies = 3 * tokens * heads * model.head_dim * engine.parameter
    return scores * (3 if dropped else 1) + (copies if engine.parameter < FP32 else 0)


def _mask(engine: MemoryInputs, stream: int) -> int:
    """Of dropout over the hidden states: numbers on a CPU, one byte each elsewhere."""
    return stream if engine.on_cpu else stream // engine.parameter


class _Head:
    """Loss and head in one: gradients of input and weight, and a chunk of logits."""

    def __init__(self, config: Config, engine: MemoryInputs) -> None:
        model, element = config.model, engine.parameter
        tokens = config.schedule.micro_batch_size * model.seq_length
        rows = model.padded_vocab(engine.tp) // engine.tp
        table, logits = rows * model.hidden_size, tokens * rows * element
        self.kept = tokens * model.hidden_size * element
        self.kept += table * (FP32 if logits > CHUNK_BYTES else element)
        self.logits = min(logits, CHUNK_BYTES)
        if not engine.on_cpu:
            self.logits += self.logits // element * FP32  # the softmax before it is rounded
        # The gradient is scaled in fp32: a copy, the product, and what is rounded.
        self.scaled = table * (FP32 if element == FP32 else 2 * FP32 + element)
