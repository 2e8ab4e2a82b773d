"""Layouts of a model that fit a device, the fastest first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds import schedule_validation
from megatron_ds.config import Config, ModelConfig
from megatron_ds.config.checks import divisors
from megatron_ds.config.devices import HOST
from megatron_ds.config.options.parallel import ALL_GATHER, HIERARCHICAL, P2P
from megatron_ds.config.problems import with_flags
from megatron_ds.engine.ds_config.fields import as_flag, field_value
from megatron_ds.planning.hardware import Hardware
from megatron_ds.planning.plan import Plan, make_plan
from megatron_ds.planning.settings import with_values

STAGES = (1, 2, 3)
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTATION = (None, "selective", "full")
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
TIE = 1.005
"""Steps within this ratio are as long: the layout with fewer stages comes first."""
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
    config: Config, world_size: int, hardware: Hardware, samples: int | None = None
) -> list[Suggestion]:
    """The fastest layout of each combination of parallel sizes that fits, the fastest first.

    Args:
        config: Complete configuration; its sizes, ZeRO stage, micro-batch size and recomputation
            are varied, and what is in the host's memory.
        world_size: Number of processes.
        hardware: Their devices, with the memory that may be used.
        samples: Samples per step. None: the global batch size of the configuration.
    """
    samples = samples or config.final_global_batch_size(world_size)
    original = config
    config = with_values(config, global_batch_size=samples)
    for offloading in OFFLOADING:
        best = list(_best_of_each_size(with_values(config, **offloading), world_size, hardware))
        if best:
            break
    shortest = min((plan.seconds for plan in best), default=1.0)
    best.sort(key=lambda plan: (int(math.log(plan.seconds / shortest, TIE)), plan.sizes["pp"]))
    return [
        Suggestion(plan, _reason(plan, best[0]), _flags(plan, original), plan.dp_size == world_size)
        for plan in best
    ]


def _flags(plan: Plan, original: Config) -> str:
    """Returns the flags that change a configuration into a plan's."""
    values = {name: field_value(plan.config, name) for name in FLAGS}
    return " ".join(
        with_flags(as_flag(name, value))
        for name, value in values.items()
        if value not in (FLAGS[name], None)
        or (value is not None and name in original.given and value != field_value(original, name))
    )


def _best_of_each_size(config: Config, world_size: int, hardware: Hardware) -> Iterator[Plan]:
    """The fastest layout of each tensor-, pipeline-, sequence- and expert-parallel size."""
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
    for (tp_size, sharing), pp_size, ep_size in itertools.product(
        sizes, pipeline_sizes, expert_sizes
    ):
        values = SHARING | sharing
        ulysses_size = values["ds_sequence_parallel_size"]
        ranks = tp_size * pp_size * ulysses_size * values["context_parallel_size"]
        if world_size % ranks or (ulysses_size > 1 and pp_size > 1):
            continue
        layout = with_values(
            config,
            tensor_model_parallel_size=tp_size,
            pipeline_model_parallel_size=pp_size,
            expert_model_parallel_size=ep_size,
            sequence_parallel=tp_size > 1 and ulysses_size == 1,
            **values,
        )
        plans = (make_plan(trial, world_size, hardware) for trial in _variants(layout, world_size))
        fitting = [
            plan
            for plan in plans
            if plan.memory.peak <= MARGIN * hardware.memory
            and sum(plan.memory.host.values()) <= MARGIN * hardware.host_memory
        ]
        if fitting:
            yield min(fitting, key=lambda plan: plan.seconds)


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


def _variants(config: Config, world_size: int) -> Iterator[Config]:
    """The settings without problems that a layout may have."""
    has_stages = config.parallel.pipeline_model_parallel_size > 1
    # Sequences are split where a micro-batch of one is too large.
    batches = MICRO_BATCHES if config.parallel.sequence_ranks == 1 else (1,)
    for stage, size, recompute in itertools.product(STAGES, batches, RECOMPUTATION):
        if stage > 1 and has_stages:
            continue  # gradients of several micro-batches are accumulated
        variant = with_values(
            config, zero_stage=stage, micro_batch_size=size, recompute_granularity=recompute
        )
        dp_size = variant.parallel.data_parallel_size(world_size)
        problems = itertools.chain(
            variant.problems(world_size), schedule_validation.problems(variant, dp_size)
        )
        if not any(problems):
            yield variant


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
    slower = plan.seconds / best.seconds - 1
    return f"{share}, {free:.0%} of the memory free" + (
        f", {slower:.0%} slower than the first" if slower > 0.005 else ""
    )
