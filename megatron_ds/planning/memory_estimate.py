"""Memory of a training process, estimated from the configuration before anything is built.

States are counted as DeepSpeed's engines keep them, activations as torch's autograd saves them for
this model (`tests/unit/planning/test_memory_estimate.py` counts both). The estimate is the
peak over the phases of a step. It excludes the libraries themselves, allocator fragmentation and
the buffers of communication libraries. With pipeline stages every part is from the stage that has
the most of it.

Activations are formulas and not counted on torch's fake tensors: torch 2.13 without CUDA aborts at
attention over fake CUDA tensors, although a CPU may plan for them, and the first operation on fake
tensors takes more than a second of every start.

Shapes: T tokens of a micro-batch on this rank, H hidden, P parameters of this tensor-parallel rank,
N ranks over which states are partitioned, v this rank's rows of the vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

from megatron_ds.config import Config, ParallelConfig
from megatron_ds.config.fields import in_effect
from megatron_ds.config.options.optimizer import MATRIX_BATCH
from megatron_ds.dataclass import dataclass
from megatron_ds.model.declaration.architecture import (
    Layer,
    is_expert,
    is_expert_matrix,
    is_matrix,
)
from megatron_ds.model.declaration.forward_pass import FP32, Pass
from megatron_ds.model.declaration.parts import FeedForwardSpec
from megatron_ds.parallel.chunks import chunk_bytes, num_tiles
from megatron_ds.planning.communication import ALLREDUCE_BUCKET
from megatron_ds.planning.memory_inputs import MemoryInputs, PlannedRun, memory_inputs

TEMPORARY = ("activations", "output layer and loss", "averaging and step", "gathered parameters")
"""Device memory in use at different times of a step."""
MALLOC_TRIM_LIMIT = 2**25
"""Bytes below which the C library may keep a freed block."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one process in bytes, by purpose."""

    device: dict[str, int] = field(default_factory=dict)
    """States on the device, gradients included."""
    host: dict[str, int] = field(default_factory=dict)
    """States in host memory."""
    disk: dict[str, int] = field(default_factory=dict)
    """States in files."""
    locked: int = 0
    """Host memory that swapping locks."""
    activations: int = 0
    """Saved for the backward pass of one micro-batch by all layers, without the output layer."""
    head: int = 0
    """Logits, loss and their gradients."""
    reduction: int = 0
    """Buckets and copies during gradient reduction and optimizer step."""
    gathered: int = 0
    """ZeRO-3: parameters that are gathered at a time."""
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase of a step -> memory of the device by purpose."""
    saved_by_layer: float = 0.0
    """What a transformer layer saves of a micro-batch if nothing is recomputed, in the mean."""
    logits: int = 0
    """All logits of a micro-batch, in the type of the parameters."""

    @property
    def phases(self) -> dict[str, int]:
        """Phase of a step -> memory of the device."""
        return {phase: sum(parts.values()) for phase, parts in self.parts.items()}

    @property
    def states(self) -> int:
        """States on the device."""
        return sum(self.device.values())

    @property
    def temporary(self) -> dict[str, int]:
        """Device memory in use at different times of a step, by purpose."""
        sizes = self.activations, self.head, self.reduction, self.gathered
        return dict(zip(TEMPORARY, sizes, strict=True))

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name])

    @property
    def peak(self) -> int:
        """Peak memory of the device."""
        return self.phases[self.peak_phase]


def planned_memory(config: Config, dp_size: int, device: str) -> MemoryEstimate:
    """Estimate the memory of one process; see `memory_inputs` for the arguments."""
    return estimate(config, memory_inputs(config, dp_size, device))


def estimate(config: Config, inputs: MemoryInputs) -> MemoryEstimate:
    """Estimate the memory of one process.

    Args:
        config: Complete configuration, with the vocabulary size.
        inputs: Settings of the engine.
    """
    return run_memory(PlannedRun.of(config, inputs))


def run_memory(run: PlannedRun) -> MemoryEstimate:
    """Estimate the memory of one process of a run."""
    sizes = _Sizes(run)
    inputs = run.inputs
    device, host = sizes.states()
    disk, locked = sizes.move_to_disk(host)
    if in_effect(run.config.checkpoint).async_save:
        host["copy of an asynchronous save"] = sizes.saved(device, host, disk)
    activations = sizes.activations()
    table, logits, scaled = sizes.output_layer()
    # Gradients of its input and weight, of each loss.
    head = (sizes.run.stream + table) * (1 + sizes.model.mtp_num_layers)
    gathered = sizes.gathered()
    reduction = sizes.reduction()
    retained = sizes.retained_by_malloc(activations)
    allocated = sizes.allocated(device) | run.rounded_weights
    buckets = sizes.num_buckets * sizes.bucket
    gathered_bucket = sizes.bucket if inputs.zero_stage == 3 else 0
    temporary = {
        "loss": (activations, head + logits, gathered_bucket, gathered),
        "start of the backward pass": (activations, head + scaled, buckets, gathered),
        "averaging of the gradients": (retained, 0, reduction, gathered),
    }
    return MemoryEstimate(
        device=device,
        host=host,
        disk=disk,
        locked=locked,
        activations=activations,
        head=head + max(logits, scaled),
        reduction=reduction,
        gathered=gathered,
        parts={
            phase: (device if phase.startswith("averaging") else allocated)
            | dict(zip(TEMPORARY, values, strict=True))
            for phase, values in temporary.items()
        },
        saved_by_layer=_saved_in_the_mean(sizes.run, run),
        logits=_logits(run),
    )


class _Sizes:
    """Bytes of the tensors of one process."""

    def __init__(self, run: PlannedRun) -> None:
        config = run.config
        inputs = run.inputs
        spec = run.spec
        self.config = config
        self.model = config.model
        self.inputs = inputs
        self.spec = spec
        self.ep_size = config.expert_parallel_size
        largest = max(run.rank_layers, key=spec.elements)
        self.full = spec.elements(largest)
        experts = spec.elements(largest, is_expert)
        # A stage keeps the activations of a micro-batch until its gradient returns.
        stages = list(run.stages)
        count = run.micro_batches
        stages[-1] += config.model.mtp_num_layers
        ends = list(itertools.accumulate(stages))
        self.stages_of_ranks = [
            [
                (slice(ends[stage] - stages[stage], ends[stage]), min(len(stages) - stage, count))
                for stage in ids
            ]
            for ids in config.parallel.stages_of_ranks
        ]
        """Layers of each stage of a pipeline rank, and the micro-batches whose activations it
        keeps, by rank."""
        self.stored_layers = self._largest_rank([1] * sum(stages))
        self.partition = self._partition(self.full, experts)
        layers = max(sum(stages[stage] for stage in ids) for ids in config.parallel.stages_of_ranks)
        self.matrices = spec.sizes(blocks := spec.blocks[:layers], is_matrix)
        elements = spec.elements(blocks, is_matrix)
        experts = spec.elements(blocks, is_expert_matrix)
        self.matrix_share = self._partition(elements, experts)
        self.moments = self._moments(elements)
        self.tokens = run.tokens
        self.run = self._pass_of_micro_batch()
        self.has_accumulator = inputs.param_bytes != inputs.accumulation_bytes
        # Gradients are reduced in buckets, but not at stage 0 and by BF16_Optimizer. A bucket is
        # allocated when the backward pass starts, under ZeRO-3 once for the entire run.
        self.has_bucket = inputs.zero_stage > 1 or (
            inputs.zero_stage == 1 and (not self.has_accumulator or inputs.offload_optimizer)
        )
        elements = min(int(inputs.zero["reduce_bucket_size"]), self.full) if self.has_bucket else 0
        self.bucket = inputs.reduction_bytes * elements
        # ZeRO-3 scatters a bucket from a copy of it.
        self.num_buckets = 2 if inputs.zero.get("overlap_comm") or inputs.zero_stage == 3 else 1
        replicas = inputs.dp_size // inputs.sequence_ranks
        samples = replicas * config.schedule.micro_batch_size
        self.is_single = config.final_global_batch_size(replicas) == samples

    def _pass_of_micro_batch(self) -> Pass:
        config = self.config
        inputs = self.inputs
        is_sharded = in_effect(config.parallel).sequence_parallel
        # Without flex attention, attention runs document by document.
        has_flex = not (inputs.on_cpu or config.model.attention_dropout > 0)
        return Pass(
            config.model,
            self.tokens,
            inputs.param_bytes,
            inputs.tp_size,
            inputs.ulysses_size,
            shards=inputs.tp_size if is_sharded else 1,
            on_cpu=inputs.on_cpu,
            saves_core=config.recompute.recompute_granularity != "selective",
            is_per_document=config.data.reset_attention_mask and not has_flex,
            has_tiles=config.recompute.tiled_mlp,
            has_whole_experts=config.has_whole_experts,
        )

    def _largest_rank(self, sizes: Sequence[int]) -> int:
        """The largest sum of the sizes of layers over what a rank keeps."""
        return max(
            sum(kept * sum(sizes[layers]) for layers, kept in stages)
            for stages in self.stages_of_ranks
        )

    def _partition(self, elements: int, experts: int) -> int:
        """Elements on each rank: an expert is partitioned over the ranks that have it."""
        dp_size = self.inputs.dp_size
        return -(-(elements - experts) // dp_size) + -(-experts * self.ep_size // dp_size)

    def _moments(self, matrices: int) -> int:
        """Bytes of all moments.

        Args:
            matrices: Elements of matrices, which have other states if they are updated as such.
        """
        inputs = self.inputs
        owned = self.full
        share = matrices
        if inputs.zero_stage > 0:
            owned = self.partition
            share = self.matrix_share
        optimizer = inputs.optimizer
        size = round(optimizer.states * owned)
        if optimizer.matrix_states is None:
            return size
        return size + round((optimizer.matrix_states - optimizer.states) * share)

    def states(self) -> tuple[dict[str, int], dict[str, int]]:
        """States on the device and on the host."""
        inputs = self.inputs
        full = self.full
        partition = self.partition
        device: dict[str, int] = {}
        host: dict[str, int] = {}
        optimizer = host if inputs.offload_optimizer else device
        parameters = host if inputs.offload_parameters else device
        elements = partition if inputs.zero_stage == 3 else full
        parameters["parameters"] = inputs.param_bytes * elements
        if inputs.zero_stage == 0:
            device["gradients"] = inputs.param_bytes * full
            device["moments"] = self.moments
            return device, host
        if inputs.zero_stage == 1:
            if self.has_bucket or not inputs.immediate_grad_update:
                device["gradients"] = inputs.param_bytes * full
            if self.has_accumulator:
                # The gradients belong to one micro-batch, until they are accumulated in fp32.
                device["accumulated gradients"] = inputs.accumulation_bytes * full
        elif inputs.zero_stage == 3 or not inputs.offload_optimizer:
            optimizer["accumulated gradients"] = inputs.accumulation_bytes * partition
        if not inputs.has_shared_masters:
            optimizer["master weights"] = inputs.master_bytes * partition
        optimizer["moments"] = self.moments * inputs.master_bytes // FP32
        if (hpz_size := int(inputs.zero.get("zero_hpz_partition_size", 1))) > 1:
            device["second copies"] = inputs.param_bytes * -(-full // hpz_size)
        if inputs.offload_optimizer and inputs.offload_fraction < 1:
            for category in ("master weights", "moments", "accumulated gradients"):
                device[category] = int((1 - inputs.offload_fraction) * host[category])
                host[category] -= device[category]
        if inputs.offload_optimizer and inputs.zero_stage < 3:
            host["copies for the device"] = inputs.param_bytes * partition
            # The optimizer reads copies of the gradients, which are summed in other tensors.
            host["gradients"] = inputs.master_bytes * partition
            if self.has_accumulator:
                device["accumulated gradients"] = inputs.accumulation_bytes * (
                    partition + (full if inputs.zero_stage == 1 else 0)
                )
            elif not self.is_single and inputs.master_bytes == FP32:
                host["accumulated gradients"] = inputs.param_bytes * partition
        return device, host

    def move_to_disk(self, host: dict[str, int]) -> tuple[dict[str, int], int]:
        """Take what is swapped out of the host's memory.

        Gradients are summed there, and are in files only between backward pass and step.

        Args:
            host: States in host memory, to be changed.

        Returns:
            States on the disk, and bytes of locked buffers, which are added to the host's.
        """
        inputs = self.inputs
        zero = self.inputs.zero
        disk = dict[str, int]()
        locked = 0
        if (optimizer := zero.get("offload_optimizer", {})).get("device") == "nvme":
            disk = {category: host.pop(category) for category in ("master weights", "moments")}
            disk["gradients"] = FP32 * self.partition
            buffers = optimizer["buffer_count"] * int(zero["sub_group_size"])
            locked += inputs.master_bytes * min(buffers, 4 * self.partition)
        if (parameters := zero.get("offload_param", {})).get("device") == "nvme":
            cpu_limit = inputs.param_bytes * int(parameters["max_in_cpu"])
            disk["parameters"] = host["parameters"]
            host["parameters"] = min(cpu_limit, host["parameters"])
            buffers = parameters.get("buffer_count", 5) * int(parameters["buffer_size"])
            locked += inputs.param_bytes * buffers
        if disk:
            host["buffers for swapping"] = locked
        return disk, locked

    def saved(self, *places: Mapping[str, int]) -> int:
        """States that the first data-parallel rank has in a checkpoint.

        Args:
            places: States in each place.
        """
        kinds = ["parameters", "master weights", "moments"][self.inputs.zero_stage == 3 :]
        return sum(sizes.get(category, 0) for sizes in places for category in kinds)

    def gathered(self) -> int:
        """Parameters that ZeRO-3 keeps gathered at a time.

        DeepSpeed gathers a parameter, or all of a layer if layers may be compiled. It keeps small
        ones, a tied embedding's, and those that are used again within the reuse distance: at the
        end of the forward pass the last layers, which are passed twice between their two uses, or
        three times if they are recomputed. Prefetching runs ahead until `max_live` parameters are
        gathered.
        """
        if self.inputs.zero_stage < 3:
            return 0
        names = ("max_reuse_distance", "max_live_parameters", "param_persistence_threshold")
        reuse, live, threshold = (int(self.inputs.zero[f"stage3_{name}"]) for name in names)
        sizes = self.spec.sizes()
        tp_size = self.inputs.tp_size
        largest = max(sizes)
        persistent = sum(n * count for n, count in sizes.items() if n <= threshold)
        if not self.model.untie_embeddings_and_output_weights:
            persistent += self.model.padded_vocab(tp_size) // tp_size * self.model.hidden_size
        is_recomputed = self.config.recompute.recompute_granularity == "full"
        ahead = reuse // (3 if is_recomputed else 2)
        if int(self.inputs.zero["stage3_prefetch_bucket_size"]) > 0:
            ahead = max(ahead, live)
        current = largest
        runtime = self.config.runtime
        if runtime.compile or not (runtime.no_compile or self.inputs.on_cpu):
            layers = (self.spec.elements([layer]) for layer in self.spec.blocks)
            current = max(largest, *layers)
        # With the last one that exceeds a limit.
        return self.inputs.param_bytes * min(self.full, persistent + ahead + current + largest)

    def allocated(self, device: dict[str, int]) -> dict[str, int]:
        """States on the device that exist before the backward pass.

        Gradients exist until the step, or until they are accumulated; accumulation starts with the
        second micro-batch, unless DeepSpeed keeps its buffer.
        """
        absent = {"gradients"} if self.is_single or self.has_accumulator else set()
        if self.is_single and self.inputs.zero_stage == 2:
            absent.add("accumulated gradients")
        return {category: size for category, size in device.items() if category not in absent}

    def matrix_updates(self) -> int:
        """Messages and the largest batch of matrices.

        The elements of this rank's partition are collected, concatenated, received and sent back;
        the update has the matrix, its transposed copy, a product and the result.
        """
        if self.inputs.optimizer.matrix_states is None:
            return 0
        largest = max(self.matrices) * self.inputs.tp_size
        batch = min(MATRIX_BATCH, self.matrix_share)
        return self.inputs.optimizer.matrix_update * 4 * (self.matrix_share + max(largest, batch))

    def reduction(self) -> int:
        inputs = self.inputs
        if not self.has_bucket:  # flattened into one message, which one rank does not send
            is_sent_in_place = inputs.dp_size == 1 or inputs.sums_in_place
            elements = 0 if is_sent_in_place else min(self.full, ALLREDUCE_BUCKET)
            message = inputs.reduction_bytes * elements
            return max(message, self.matrix_updates())
        # The optimizer steps on a flat copy of the gradients of its partition.
        copied = FP32
        if inputs.has_shared_masters:
            copied = inputs.accumulation_bytes
            copied += inputs.master_bytes if inputs.master_bytes != copied else 0
        step = 0 if inputs.offload_optimizer else copied * self.partition
        step += self.matrix_updates()
        buckets = self.num_buckets * self.bucket
        return max(buckets, step) if inputs.zero_stage < 3 else buckets + step

    def retained_by_malloc(self, activations: int) -> int:
        """Activations that are freed but that malloc does not return to the system."""
        inputs = self.inputs
        block = self.tokens * self.model.mlp_hidden_size * inputs.param_bytes // inputs.tp_size
        return activations if inputs.on_cpu and block < MALLOC_TRIM_LIMIT else 0

    def activations(self) -> int:
        """Saved for the backward pass by all layers, without the output layer."""
        model = self.model
        run = self.run
        recompute = in_effect(self.config.recompute)
        blocks = self.spec.blocks
        ends = sum(layer.saved(run) for layer in (*self.spec.before, *self.spec.after))
        saved, tables = _saved_by_layer(blocks, _by_layer(run, self.config.parallel, len(blocks)))
        ends += tables
        if recompute.tiled_mlp:
            inner = FeedForwardSpec(model).inner(run)
            ends += inner // num_tiles(self.tokens, model.hidden_size)
        if recompute.recompute_granularity != "full":
            return ends + self._largest_rank(saved)
        size = recompute.checkpoint_num_layers
        stored_inputs = (
            0 if recompute.checkpoint_in_cpu else -(-self.stored_layers // size) * run.between
        )
        ends += stored_inputs // (run.tp_size if recompute.partition_activations else 1)
        units = (sum(saved[first : first + size]) for first in range(0, len(saved), size))
        return ends + max(units, default=0)

    def output_layer(self) -> tuple[int, int, int]:
        """The gradient of its weight, a chunk of logits, and the temporary tensors of scaling."""
        element = self.inputs.param_bytes
        table = self.spec.after[-1].matmul_macs(keys=0) // self.inputs.tp_size
        logits = self.tokens * table // self.model.hidden_size * element
        most = chunk_bytes(on_host=self.inputs.on_cpu)
        is_summed_in_fp32 = logits > most or self.config.precision.name == "fp16"
        gradient = table * (FP32 if is_summed_in_fp32 else element)
        logits = min(logits, most)
        # The softmax before rounding, and the derivative of the bound of logits.
        copies = (not self.inputs.on_cpu) + (self.model.final_logit_softcapping is not None)
        logits += logits // element * FP32 * copies
        # The gradient is scaled in fp32: a copy, the product and the rounded result.
        return gradient, logits, table * (FP32 if element == FP32 else 2 * FP32 + element)


def _saved_in_the_mean(micro_batch: Pass, run: PlannedRun) -> float:
    """Bytes that a transformer layer saves in the mean if nothing is recomputed."""
    blocks = run.spec.blocks
    micro_batch = replace(micro_batch, saves_core=True, has_tiles=False)
    passes = _by_layer(micro_batch, run.config.parallel, len(blocks))
    saved, _ = _saved_by_layer(blocks, passes)
    return sum(saved) / max(1, len(saved))


def _logits(run: PlannedRun) -> int:
    """Bytes of all logits of a micro-batch, of each loss."""
    model = run.config.model
    rows = run.spec.after[-1].matmul_macs(keys=0) // run.inputs.tp_size // model.hidden_size
    return (1 + model.mtp_num_layers) * run.tokens * rows * run.inputs.param_bytes


def _by_layer(run: Pass, parallel: ParallelConfig, count: int) -> list[Pass]:
    """A pass as layers see it, with the ranks that share their heads."""
    if not parallel.has_mixed_kinds:
        return [run] * count
    inner = [parallel.exchange_of(layer).inner for layer in range(count)]
    return [replace(run, ulysses_size=run.ulysses_size * size) for size in inner]


def _saved_by_layer(blocks: Sequence[Layer], passes: Sequence[Pass]) -> tuple[list[int], int]:
    """Bytes that each layer saves for the backward pass, and of the tables that layers share.

    Layers of the same parts save as many.

    Args:
        blocks: The layers.
        passes: The pass of each.
    """
    keys = [
        (id(block.parts), layer_pass.ulysses_size)
        for block, layer_pass in zip(blocks, passes, strict=True)
    ]
    forms = dict(zip(keys, zip(blocks, passes, strict=True), strict=True))
    tables = {
        (part, layer_pass.ulysses_size): part.table(layer_pass)
        for block, layer_pass in forms.values()
        for part in block.parts.values()
    }
    saved = {key: block.saved(layer_pass) for key, (block, layer_pass) in forms.items()}
    return [saved[key] for key in keys], sum(tables.values())
