"""Predicts memory, communication and time of a run from its settings, on any number of processes.

Parameters, states and communication volume follow from the settings. Times are a model: every
matmul runs at a fraction of the device's peak, every collective at the bandwidth of its links after
the latency of its steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.devices import is_host
from megatron_ds.config.parallel_axes import RANK_ORDER
from megatron_ds.config.problems import raise_if_any
from megatron_ds.dataclass import dataclass
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.model.declaration.architecture import (
    expert_macs,
    model_spec,
    param_group_problems,
)
from megatron_ds.model.declaration.forward_pass import FP32
from megatron_ds.model.declaration.fp8 import fp8_matrices, fp8_problems
from megatron_ds.model.declaration.parts import AttentionSpec
from megatron_ds.parallel.context.layout import CHUNKS, chunks_of
from megatron_ds.parallel.weights import Weight
from megatron_ds.planning.communication import RING, Traffic, step_traffic
from megatron_ds.planning.hardware import Hardware
from megatron_ds.planning.memory_estimate import MemoryEstimate, run_memory
from megatron_ds.planning.memory_inputs import (
    DTYPE_BYTES,
    MemoryInputs,
    PlannedRun,
    memory_inputs,
)

BACKWARD = 2 / 3
"""Fraction of a step's matmuls in the backward pass, during which gradients are averaged."""
CAST_BYTES = 10
"""Bytes that are read and written to cast a number to fp8: for its range, twice for its codes, and
for a transposed copy."""
DAY = 86400.0
REPLICATED = ("replicas", "expert_dp", "sequence", "heads")
"""Groups whose neighbouring ranks differ by a tensor-parallel group."""


@dataclass(frozen=True)
class Link:
    """Messages of a step and the links that they take."""

    traffic: Traffic
    between: bool
    """Whether the ranks are on several machines."""
    seconds: float
    latency: float
    """Latency, included in `seconds`."""


@dataclass(frozen=True)
class Plan:
    """A run of some settings on some devices. Sizes are in bytes, times in seconds per step."""

    config: Config
    world_size: int
    hardware: Hardware
    efficiency_origin: str
    """Where the devices' share of the peak comes from."""
    sizes: dict[str, int]
    """Sizes of the parallel axes, in the order of `RANK_ORDER`."""
    layers: tuple[int, ...]
    """Transformer layers of each stage."""
    parameters: int
    """Parameters of the complete model."""
    rank_parameters: tuple[int, ...]
    """Parameters of each pipeline rank, on one tensor-parallel rank."""
    memory: MemoryEstimate
    """Memory of the rank that needs the most."""
    links: tuple[Link, ...]
    """Links of the pipeline rank that communicates the longest."""
    micro_batches: int
    moments: int
    """Optimizer state tensors per parameter."""
    samples: int
    """Samples per step."""
    flops: int
    """Operations of a step on all ranks, without recomputation."""
    compute: float
    """Seconds of a rank's matmuls and kernels per step, recomputation included."""
    bubble: float
    """Fraction of a step in which a pipeline rank is idle."""
    optimizer: float
    """The optimizer step, which reads and writes the states, also those in the host's memory."""
    exposed: float
    """Communication that is not hidden behind computation."""
    run: PlannedRun = field(repr=False, compare=False)
    """The quantities from which the times follow."""

    @property
    def machines(self) -> int:
        return -(-self.world_size // self.hardware.per_machine)

    @property
    def dp_size(self) -> int:
        """Ranks with different samples."""
        return self.sizes["dp"] * self.sizes["ep"]

    @property
    def seconds(self) -> float:
        return self.compute / (1 - self.bubble) + self.exposed + self.optimizer

    @property
    def latency(self) -> float:
        """Seconds of the latencies of a step's communication, independent of its volume."""
        return sum(link.latency for link in self.links)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.samples * self.config.model.seq_length

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tflops(self) -> float:
        """10^12 operations per second and device, without recomputation, as the log shows them."""
        return self.flops / self.seconds / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops / self.hardware.tflops(self.config.precision.name)

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / DAY

    @property
    def weights_size(self) -> int:
        """Weights of a checkpoint."""
        return self.parameters * DTYPE_BYTES[self.config.precision.name]

    @property
    def checkpoint_size(self) -> int:
        """A complete checkpoint: weights, and master weights and moments in fp32."""
        master = 0 if self.config.precision.name == "fp32" else FP32
        return self.weights_size + self.parameters * (master + self.moments * FP32)

    @property
    def save_seconds(self) -> float:
        """Seconds to write a complete checkpoint; reading it takes at most as long."""
        return self.checkpoint_size / (self.machines * self.hardware.storage)

    @property
    def async_save_seconds(self) -> float:
        """Seconds an async save blocks training: the copy to host memory."""
        return self.checkpoint_size / self.world_size / self.hardware.host

    def ds_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration, as the run would write it."""
        return build_ds_config(self.config, self.dp_size, self.hardware.kind)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The positions of a rank along `RANK_ORDER`."""
        coordinates = []
        for axis in reversed(RANK_ORDER):
            rank, position = divmod(rank, self.sizes[axis])
            coordinates.append(position)
        return tuple(reversed(coordinates))

    def rank_map(self) -> Iterator[tuple[int, ...]]:
        """The coordinates of every rank."""
        return map(self.coordinates, range(self.world_size))


def make_plan(
    config: Config, world_size: int, hardware: Hardware, inputs: MemoryInputs | None = None
) -> Plan:
    """Plans a run.

    Args:
        config: Complete configuration without problems, with the vocabulary size.
        world_size: Number of processes.
        hardware: Their devices.
        inputs: What `memory_inputs` returns for them. None: it is computed.

    Raises:
        UserError: If the padded vocabulary does not fit, a pattern of names matches no weight, or
            no layer is large enough for fp8.
    """
    raise_if_any(config.model.padding_problems(config.parallel.tensor_model_parallel_size))
    raise_if_any(param_group_problems(config))
    raise_if_any(fp8_problems(config))
    dp_size = config.parallel.data_parallel_size(world_size)
    axes = config.axis_sizes
    sizes = {name: axes.get(f"{name}_size", dp_size // axes["ep_size"]) for name in RANK_ORDER}
    run = PlannedRun.of(config, inputs or memory_inputs(config, dp_size, hardware.kind))
    memory = run_memory(run)
    spec = run.spec
    layers = run.stages
    parameters = model_spec(config.model, config.moe).elements()
    sample_flops = spec.flops(config.model.seq_length)
    own_layers = [sum(layers[stage] for stage in held) for held in config.parallel.stages_of_ranks]
    longest = {0, own_layers.index(max(own_layers)), sizes["pp"] - 1}
    by_rank = [
        tuple(
            Link(traffic, *_link_time(traffic, sizes, hardware))
            for traffic in step_traffic(run, pp_rank)
        )
        for pp_rank in sorted(longest)
    ]
    links = max(by_rank, key=lambda links: sum(link.seconds for link in links))
    samples = config.final_global_batch_size(dp_size)
    return Plan(
        config=config,
        world_size=world_size,
        efficiency_origin=hardware.efficiency_origin,
        sizes=sizes,
        layers=layers,
        parameters=parameters,
        rank_parameters=tuple(map(spec.elements, run.rank_layers)),
        memory=memory,
        links=links,
        micro_batches=run.micro_batches,
        moments=run.inputs.optimizer.count,
        samples=samples,
        flops=samples * sample_flops,
        bubble=_bubble(run, sizes["pp"]),
        run=run,
        **_times(run, sizes, memory, links, hardware),
    )


def with_rates(plan: Plan, hardware: Hardware) -> Plan:
    """The plan with other rates of the kernels. Those of the links stay."""
    times = _times(plan.run, plan.sizes, plan.memory, plan.links, hardware)
    return dataclasses.replace(plan, efficiency_origin=hardware.efficiency_origin, **times)


def _times(
    run: PlannedRun,
    sizes: dict[str, int],
    memory: MemoryEstimate,
    links: tuple[Link, ...],
    hardware: Hardware,
) -> dict[str, Any]:
    """The seconds of a step, and the devices with the share of the peak that all kernels reach."""
    compute, scores, at_peak = _compute_seconds(run, sizes, hardware, memory)
    states = sum(memory.device.values())
    host = sum(memory.host.values())
    # The processor that computes sends as well.
    hiding = (0.0, 0.0) if is_host(hardware.kind) else (compute, scores)
    return {
        "hardware": dataclasses.replace(hardware, efficiency=at_peak / compute),
        "compute": compute,
        "optimizer": 2 * states / hardware.memory_rate + 2 * host / hardware.host,
        "exposed": _exposed(links, *hiding, contention=hardware.contention),
    }


def _compute_seconds(
    run: PlannedRun, sizes: dict[str, int], hardware: Hardware, memory: MemoryEstimate
) -> tuple[float, float, float]:
    """Seconds of the kernels of the pipeline rank that takes the longest; those of them that are
    scores of attention, and their products with the values; and the seconds of all its products at
    the peak of the device.

    Kernels besides products read and write what the backward pass needs, at the rate of the
    memory. Of context-parallel ranks, the result is that of the busiest one.
    """
    config = run.config
    spec = run.spec
    layers = run.stages
    model = config.model
    recompute = config.recompute.recompute_granularity
    passes = 4 / 3 if recompute == "full" else 1.0
    length = model.seq_length
    without_scores = length * spec.flops(1, spec.blocks)  # but for those of a single key
    score_flops: float = spec.flops(length, spec.blocks) - without_scores
    score_flops *= _busiest(run) * (passes if recompute is None else 4 / 3)
    layer_flops = (passes * without_scores + score_flops) / model.num_layers
    # Products of experts, and of scores, take the time of more or fewer operations.
    added: float = passes * 6 * length * expert_macs(spec.blocks) * (1 / hardware.grouped - 1)
    added += score_flops * (1 / hardware.attention - 1)
    added *= 0.0 if hardware.efficiency else 1 / model.num_layers
    matrices = [] if config.precision.name == "fp32" else fp8_matrices(config, spec.blocks)
    saved_macs = sum(_used(run, w) * math.prod(w.shape) for w in matrices)
    saved_macs *= 1 - hardware.fp8_operations
    added -= passes * 6 * length * saved_macs / model.num_layers
    peak = hardware.tflops(config.precision.name) * 1e12
    share = hardware.efficiency or hardware.share
    per_flop = config.schedule.micro_batch_size / (
        peak * sizes["tp"] * config.parallel.sequence_ranks
    )
    casts = _cast_seconds(run, matrices, hardware) / model.num_layers
    per_byte = (0.0 if hardware.efficiency else hardware.passes) / hardware.memory_rate
    slowest: tuple[float, float, int] = (0.0, 0.0, 0)
    for stages in config.parallel.stages_of_ranks:
        held = sum(layers[at] for at in stages)
        has_end = len(layers) - 1 in stages
        ends = spec.flops(length, spec.after) if has_end else 0
        at_peak = per_flop * (held * layer_flops + ends)
        moved = held * passes * memory.saved_by_layer + has_end * memory.logits
        seconds = (at_peak + per_flop * held * added) / share + per_byte * moved
        seconds += held * casts
        slowest = max(slowest, (max(seconds, held * passes * hardware.kernels), at_peak, held))
    seconds, at_peak, held = slowest
    count = run.micro_batches
    score_rate = share * (1.0 if hardware.efficiency else hardware.attention)
    scores = per_flop / score_rate * score_flops * held / model.num_layers
    return count * seconds, count * scores, count * at_peak


def _cast_seconds(run: PlannedRun, matrices: Sequence[Weight], hardware: Hardware) -> float:
    """Seconds of the casts to fp8 of a micro-batch, if the rank had all layers.

    Each input and output feature of a token is cast. Weights are cast once in a step, at ZeRO stage
    3 for each micro-batch.
    """
    if not hardware.tflops_8:
        return 0.0
    tp_size = run.config.parallel.tensor_model_parallel_size
    features = 0.0
    elements = 0.0
    for weight in matrices:
        rows, columns = weight.shape[-2:]
        is_by_row = weight.shard is None or weight.shard.dim == weight.is_stacked
        received = run.config.moe.moe_router_topk if weight.is_stacked else 1
        sizes = (rows / tp_size, columns) if is_by_row else (rows, columns / tp_size)
        features += received * sum(sizes)
        elements += math.prod(weight.shape) / tp_size
    times = 1 if run.inputs.zero_stage == 3 else 1 / run.micro_batches
    return CAST_BYTES * (run.tokens * features + times * elements) / hardware.memory_rate


def _used(run: PlannedRun, weight: Weight) -> float:
    """The part of a weight that a token is multiplied by."""
    return run.config.moe.moe_router_topk / weight.shape[0] if weight.is_stacked else 1.0


def _busiest(run: PlannedRun) -> float:
    """Scores of the context-parallel rank that computes the most, relative to the mean.

    Ranks have as many tokens and, without a window, as many scores. With one, the rank with the
    first chunk has fewer, whose queries have fewer keys before them.
    """
    parallel = run.config.parallel
    ranks = parallel.cp_size
    length = run.config.model.seq_length
    totals = [0.0] * ranks
    for layer, block in enumerate(run.spec.blocks):
        attention = block.parts.get("attention")
        if not isinstance(attention, AttentionSpec):
            continue
        window = attention.rule.window or length
        groups = parallel.exchange_of(layer).outer if ranks > 1 else 1
        chunks = CHUNKS * groups
        until = [_scores_until(length * at // chunks, window) for at in range(chunks + 1)]
        for rank in range(ranks):
            held = chunks_of(rank * groups // ranks, groups)
            totals[rank] += sum(until[at + 1] - until[at] for at in held) * groups / ranks
    return max(totals) * ranks / sum(totals) if sum(totals) else 1.0


def _scores_until(position: int, window: int) -> int:
    """Scores of all queries before a position: each has one with itself and the keys before it."""
    full = min(position, window)
    return full * (full + 1) // 2 + (position - full) * window


def _bubble(run: PlannedRun, ranks: int) -> float:
    """Idle share of a pipeline rank: of 1F1B by Narayanan et al. 2021, section 2.2.

    For DualPipeV, a line through the values of docs/training/pipeline.md, from DeepSpeed's lists
    of instructions.
    """
    if ranks == 1:
        return 0.0
    idle = ranks - 1 if len(run.stages) == ranks else 0.65 * ranks - 0.8
    return idle / (run.micro_batches + idle)


def _link_time(
    traffic: Traffic, sizes: dict[str, int], hardware: Hardware
) -> tuple[bool, float, float]:
    """Whether the communication leaves a machine, its total seconds, and the seconds of its
    latency.

    Ranks of a group that share a machine send to others over all of their network cards.
    """
    # Distance of neighbouring ranks of the axis, by default of stages.
    strides = {}
    stride = 1
    for axis in reversed(RANK_ORDER):
        strides[axis] = stride
        stride *= sizes[axis]
    strides |= {"ep_tp": 1} | dict.fromkeys(REPLICATED, sizes["tp"])
    strides["chunks"] = strides["cp"] * sizes["cp"] // traffic.ranks
    stride = strides.get(traffic.axis, strides["pp"])
    inside = max(1, min(traffic.ranks, hardware.per_machine // stride))
    latency = traffic.messages * _latency(traffic, inside, hardware)
    if inside >= traffic.ranks:
        return False, traffic.sent / hardware.inside + latency, latency
    rate = min(hardware.inside, inside * hardware.between)
    return True, traffic.sent / rate + latency, latency


def _latency(traffic: Traffic, inside: int, hardware: Hardware) -> float:
    """Seconds that a message takes however small it is.

    A ring has a step for each of its other ranks; one per machine crosses the network. An
    all-reduce takes a tree over the machines where it has fewer steps.

    Args:
        traffic: The message.
        inside: Ranks of the group on one machine.
        hardware: The devices.
    """
    machines = -(-traffic.ranks // inside)
    near = traffic.ranks - machines
    far = machines - 1
    if traffic.operation in ("all-to-all", "send"):
        near = int(far == 0)
        far = min(far, 1)
    elif traffic.operation == "all-reduce" and far > (depth := math.ceil(math.log2(machines))):
        near = inside - 1
        far = depth
    times = RING.get(traffic.operation, 1)
    return times * (near * hardware.latency_inside + far * hardware.latency_between)


def _exposed(links: tuple[Link, ...], compute: float, scores: float, *, contention: float) -> float:
    """Seconds of communication that `compute` seconds of computation, of which `scores` are of
    attention, do not hide.

    Hidden messages delay the computation by a fraction of their time, since they share the memory
    and the processors with it. Sends between stages are hidden, except for what the bubble counts.
    """
    hidden = sum(link.seconds for link in links if link.traffic.overlaps)
    part = max((link.traffic.overlaps for link in links), default=0.0)
    waiting = 0.0
    for link in links:
        behind = link.traffic.behind_scores
        if behind is not None:
            waiting += max(0.0, link.seconds - behind * scores)
        elif not link.traffic.overlaps and link.traffic.operation != "send":
            waiting += link.seconds
    late = max(0.0, hidden - BACKWARD * compute * part)
    return waiting + late + contention * (hidden - late)
