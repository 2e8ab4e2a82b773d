"""Layouts of a model that fit a device, the fastest first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ds import schedule_validation
from megatron_ds.config import Config, ModelConfig
from megatron_ds.config.checks import divisors
from megatron_ds.config.devices import HOST
from megatron_ds.config.options.parallel import ALL_GATHER, HIERARCHICAL, P2P
from megatron_ds.config.problems import counted, with_flags
from megatron_ds.dataclass import dataclass
from megatron_ds.engine.ds_config.fields import as_flag, field_value
from megatron_ds.planning.hardware import Hardware
from megatron_ds.planning.memory_estimate import MemoryEstimate, run_memory
from megatron_ds.planning.memory_inputs import MemoryInputs, PlannedRun, memory_inputs
from megatron_ds.planning.plan import Plan, make_plan
from megatron_ds.planning.settings import with_values

STAGES = (1, 2, 3)
OFFLOADING: tuple[dict[str, Any], ...] = (
    {},
    {"cpu_optimizer": True},
    {"cpu_optimizer": True, "remote_device": HOST},
)
"""Fields of offloading. Each entry is tried only if nothing fits with the one before."""
SEQUENCE_SIZES = (2, 4, 8, 16, 32, 64)
LEAST_TOKENS = 4096
"""Tokens of a sequence on a rank for which ranks exchange keys."""
SHARING: dict[str, Any] = {
    "context_parallel_size": 1,
    "cp_comm_type": (P2P,),
    "hierarchical_context_parallel_sizes": None,
    "ds_sequence_parallel_size": 1,
}
"""Fields of ranks that share sequences, and their values without."""
FLAGS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "zero_stage": -1,
    "micro_batch_size": -1,
    **SHARING,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "recompute_granularity": "",
    "cpu_optimizer": False,
    "remote_device": "none",
}
"""Fields of a layout, which its flags name unless they have this value or None and were not given
another one."""
TIE = 1.02
"""Steps within this ratio are as long: the lower ZeRO stage and less model parallelism come first.
The model of the time is not more accurate."""
MARGIN = 0.92
"""Share of a device's memory that may be planned: libraries and fragmentation need the rest."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits."""

    plan: Plan
    reason: str
    flags: str
    """The flags of the layout."""
    has_data_parallelism_only: bool


def suggest(
    config: Config,
    world_size: int,
    hardware: Hardware,
    samples: int | None = None,
    report: Callable[[str], None] | None = None,
) -> list[Suggestion]:
    """The fastest layout of each combination of parallel sizes that fits, the fastest first.

    The first one is the simplest of those that are at most 2 % slower than the fastest: with the
    fewest model-parallel ranks, and among them with the lowest ZeRO stage. ZeRO 1 with data
    parallelism alone is always in the list if it fits.

    Args:
        config: Complete configuration; its sizes, ZeRO stage, micro-batch size and recomputation
            are varied, and what is in the host's memory.
        world_size: Number of processes.
        hardware: Their devices, with the memory that may be used.
        samples: Samples per step. None: the global batch size of the configuration.
        report: Called with a line on what is tried, before it is tried.
    """
    samples = samples or config.final_global_batch_size(world_size)
    original = config
    config = with_values(config, global_batch_size=samples)
    layouts = list(_layouts(config, world_size, hardware))
    for offloading in OFFLOADING:
        if report:
            flags = " ".join(with_flags(as_flag(*item)) for item in offloading.items())
            report(_tried(len(layouts), flags))
        search = _Search(with_values(config, **offloading), world_size, hardware)
        best = [plan for layout in layouts for plan in search.best_of(layout)]
        if best:
            break
    plans = _sorted(best)
    return [
        Suggestion(plan, _reason(plan, plans[0]), _flags(plan, original), _model_ranks(plan) == 1)
        for plan in plans
    ]


def _tried(count: int, flags: str) -> str:
    """Describes a search."""
    sizes = counted(count, "combination", ",") + " of parallel sizes"
    sizes += f" with {flags}" if flags else ""
    return f"trying {sizes}, each with ZeRO stages, micro-batch sizes and recomputation"


def _sorted(plans: list[Plan]) -> list[Plan]:
    """The plans by their time, after the simplest of the fastest ones."""
    plans = sorted(plans, key=lambda plan: plan.seconds)
    fastest = [plan for plan in plans if plan.seconds <= TIE * plans[0].seconds]
    simplest = min(fastest, key=_complexity, default=None)
    return [*([simplest] if simplest else []), *(plan for plan in plans if plan is not simplest)]


def _complexity(plan: Plan) -> tuple[int, ...]:
    """What is preferred among plans of the same time, the lowest first."""
    return _model_ranks(plan), plan.sizes["pp"], plan.sizes["ep"], plan.config.zero_stage


def _model_ranks(plan: Plan) -> int:
    """Ranks that share the model or its sequences; experts are shared by data-parallel ranks."""
    return math.prod(plan.sizes[axis] for axis in ("tp", "pp", "cp", "ulysses"))


def _flags(plan: Plan, original: Config) -> str:
    """Returns the flags that change a configuration into a plan's."""
    values = {name: field_value(plan.config, name) for name in FLAGS}
    return " ".join(
        with_flags(as_flag(name, value))
        for name, value in values.items()
        if value not in (FLAGS[name], None)
        or (value is not None and name in original.given and value != field_value(original, name))
    )


def _layouts(config: Config, world_size: int, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Fields of each combination of tensor-, pipeline-, sequence- and expert-parallel sizes."""
    model = config.model
    moe = config.moe
    tensor_sizes = [
        size
        for size in divisors(model.num_attention_heads)
        if size <= hardware.per_machine and model.kv_heads % size == 0
    ]
    pipeline_sizes = [size for size in divisors(world_size) if size <= model.num_layers]
    expert_sizes = [1]
    if moe.is_used:
        near = min(moe.experts, hardware.per_machine)
        expert_sizes = sorted({1, math.gcd(moe.experts, near), moe.experts})
    sizes = (
        (tp_size, sharing)
        for tp_size in tensor_sizes
        for sharing in _sharing_of_sequences(model, tp_size, hardware.per_machine // tp_size)
    )
    samples = config.final_global_batch_size(world_size)
    for (tp_size, sharing), pp_size, ep_size in itertools.product(
        sizes, pipeline_sizes, expert_sizes
    ):
        values = SHARING | sharing
        ulysses_size = values["ds_sequence_parallel_size"]
        ranks = tp_size * pp_size * ulysses_size * values["context_parallel_size"]
        if world_size % ranks or (ulysses_size > 1 and pp_size > 1):
            continue
        dp_size = world_size // ranks
        if samples % dp_size or dp_size % ep_size:
            continue
        yield {
            "tensor_model_parallel_size": tp_size,
            "pipeline_model_parallel_size": pp_size,
            "expert_model_parallel_size": ep_size,
            "sequence_parallel": tp_size > 1 and ulysses_size == 1,
            **values,
        }


def _sharing_of_sequences(model: ModelConfig, tp_size: int, near: int) -> Iterator[dict[str, Any]]:
    """Values of `SHARING`.

    Ranks of a machine exchange slices for heads, which sends the least, where they can share the
    heads evenly. Those of other numbers of heads, and more ranks than a machine has, exchange keys.

    Args:
        model: Architecture.
        tp_size: Tensor-parallel size.
        near: Tensor-parallel groups of a machine.
    """
    yield {}
    heads = model.num_attention_heads // tp_size
    kv_heads = model.kv_heads // tp_size
    for size in SEQUENCE_SIZES:
        most = max(
            inner
            for inner in divisors(math.gcd(size, heads))
            if inner <= near and (kv_heads % inner == 0 or inner % kv_heads == 0)
        )
        if most == size:
            yield {"ds_sequence_parallel_size": size}
            continue
        if model.seq_length // size < LEAST_TOKENS:
            continue
        for exchange in (P2P, ALL_GATHER):
            yield {"context_parallel_size": size, "cp_comm_type": (exchange,)}
        if most > 1:
            yield {
                "context_parallel_size": size,
                "cp_comm_type": (HIERARCHICAL,),
                "hierarchical_context_parallel_sizes": (most, size // most),
            }


class _Search:
    """The best ZeRO stage, micro-batch size and recomputation of parallel sizes.

    What cannot be faster, or needs more memory than what does not fit, is not tried.
    """

    def __init__(self, config: Config, world_size: int, hardware: Hardware) -> None:
        self.config = config
        self.world_size = world_size
        self.hardware = hardware

    def best_of(self, layout: dict[str, Any]) -> list[Plan]:
        """The best plan of parallel sizes, and that of ZeRO 1 with data parallelism alone.

        The lowest stage that is at most 2 % slower than the fastest is the best.
        """
        config = with_values(self.config, **layout)
        has_stages = config.parallel.pipeline_model_parallel_size > 1
        if not (has_stages or self._can_fit(config)):
            return []
        plans: list[Plan] = []
        # Pipeline stages accumulate gradients of several micro-batches: only ZeRO 1.
        for stage in STAGES[:1] if has_stages else STAGES:
            if plan := self._best_of_stage(with_values(config, zero_stage=stage)):
                plans.append(plan)
                if plan.seconds <= TIE * _least_seconds(plan):
                    break
        if not plans:
            return []
        shortest = min(plan.seconds for plan in plans)
        best = next(plan for plan in plans if plan.seconds <= TIE * shortest)
        is_alone = _model_ranks(best) == 1 and best.sizes["ep"] == 1
        simple = [plan for plan in plans if is_alone and plan.config.zero_stage == 1]
        return [best, *(plan for plan in simple if plan is not best)]

    def _can_fit(self, config: Config) -> bool:
        """Whether the memory may suffice: that of ZeRO 3 with all recomputed does, without the
        parameters that it gathers."""
        config = with_values(config, zero_stage=STAGES[-1], recompute_granularity="full")
        memory = self._memory(config, self._inputs(config), 1)
        least = max(sum(parts.values()) for parts in memory.parts.values()) - memory.gathered
        return least <= MARGIN * self.hardware.memory

    def _inputs(self, config: Config) -> MemoryInputs:
        config = with_values(config, micro_batch_size=1)
        dp_size = config.parallel.data_parallel_size(self.world_size)
        return memory_inputs(config, dp_size, self.hardware.kind)

    def _best_of_stage(self, config: Config) -> Plan | None:
        """The best plan of a ZeRO stage; None if none fits, or if it is not supported."""
        if not self._is_valid(config):
            return None
        inputs = self._inputs(config)
        plan = self._best_size(with_values(config, recompute_granularity=None), inputs)
        recomputed = with_values(config, recompute_granularity="full")
        if plan is not None or not self._fits(recomputed, inputs):
            return plan
        # Attention alone is recomputed faster.
        for granularity in ("selective", "full"):
            variant = with_values(config, recompute_granularity=granularity)
            if self._is_valid(variant) and (plan := self._best_size(variant, inputs)):
                return plan
        return None

    def _is_valid(self, config: Config) -> bool:
        config = with_values(config, micro_batch_size=1)
        dp_size = config.parallel.data_parallel_size(self.world_size)
        problems = itertools.chain(
            config.problems(self.world_size), schedule_validation.problems(config, dp_size)
        )
        return not any(problems)

    def _best_size(self, config: Config, inputs: MemoryInputs) -> Plan | None:
        """The plan with the best micro-batch size; None if no size fits.

        Sizes are powers of two. The largest one has the fewest kernels and messages; with pipeline
        stages, a larger one also has a longer idle time.
        """
        dp_size = config.parallel.data_parallel_size(self.world_size)
        samples = config.final_global_batch_size(dp_size) // dp_size
        sizes = [size for size in _powers_of_two(samples) if samples % size == 0]
        if inputs.sequence_ranks > 1:
            sizes = sizes[:1]  # sequences are split where a micro-batch of one is too large
        if config.parallel.pipeline_model_parallel_size == 1:
            largest = self._largest_size(config, inputs, sizes)
            return None if largest is None else self._plan(config, inputs, largest)
        best = None
        for size in sizes:
            if not self._fits(config, inputs, size):
                break
            plan = self._plan(config, inputs, size)
            if best is not None and plan.seconds >= best.seconds:
                break
            best = plan
        return best

    def _largest_size(self, config: Config, inputs: MemoryInputs, sizes: list[int]) -> int | None:
        """The largest micro-batch size that fits."""
        memory = self._memory(config, inputs, sizes[0])
        if not self._is_enough(memory):
            return None
        # As if all that is not a state grew with the size.
        states = min(memory.states, memory.peak - 1)
        free = MARGIN * self.hardware.memory - states
        likely = free / (memory.peak - states)
        at = max(index for index, size in enumerate(sizes) if size <= max(1.0, likely))
        while at + 1 < len(sizes) and self._fits(config, inputs, sizes[at + 1]):
            at += 1
        while at and not self._fits(config, inputs, sizes[at]):
            at -= 1
        return sizes[at]

    def _fits(self, config: Config, inputs: MemoryInputs, size: int = 1) -> bool:
        return self._is_enough(self._memory(config, inputs, size))

    def _memory(self, config: Config, inputs: MemoryInputs, size: int) -> MemoryEstimate:
        return run_memory(PlannedRun.of(with_values(config, micro_batch_size=size), inputs))

    def _is_enough(self, memory: MemoryEstimate) -> bool:
        """Whether the memory of the device and of its machine suffice."""
        host = sum(memory.host.values())
        fits_host = host <= MARGIN * self.hardware.host_memory
        return fits_host and memory.peak <= MARGIN * self.hardware.memory

    def _plan(self, config: Config, inputs: MemoryInputs, size: int) -> Plan:
        config = with_values(config, micro_batch_size=size)
        return make_plan(config, self.world_size, self.hardware, inputs)


def _least_seconds(plan: Plan) -> float:
    """A step of the same parallel sizes without messages, recomputation and launches of kernels."""
    again = 1.0 if plan.config.recompute.recompute_granularity is None else 4 / 3
    launches = plan.micro_batches * max(plan.layers) * plan.hardware.kernels
    return plan.compute / again - launches


def _powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to a limit."""
    size = 1
    while size <= most:
        yield size
        size *= 2


def _reason(plan: Plan, best: Plan) -> str:
    """Describes the largest cost outside of matmuls, the free memory, and the slowdown relative to
    the best plan."""
    shares = {
        "pipeline idle": plan.compute / (1 - plan.bubble) - plan.compute,
        "communication": plan.exposed,
        "optimizer": plan.optimizer,
    }
    if plan.config.recompute.recompute_granularity == "full":
        shares["recomputation"] = plan.compute / 4
    largest = max(shares, key=lambda name: shares[name])
    share = f"{largest} {shares[largest] / plan.seconds:.0%} of the step"
    free = 1 - plan.memory.peak / plan.hardware.memory
    ratio = plan.seconds / best.seconds - 1
    compared = f", {abs(ratio):.1%} {'slower' if ratio > 0 else 'faster'} than the first"
    return f"{share}, {free:.0%} of the memory free" + (compared if abs(ratio) > 5e-4 else "")
