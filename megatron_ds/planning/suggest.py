"""Layouts of a model that fit a device, the fastest first."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds import schedule_validation
from megatron_ds.config import Config
from megatron_ds.config.checks import divisors
from megatron_ds.planning.hardware import Hardware
from megatron_ds.planning.plan import Plan, make_plan, with_values

STAGES = (1, 2, 3)
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTATION = (None, "selective", "full")
MARGIN = 0.92
"""Share of a device's memory that may be planned: libraries and fragmentation need the rest."""


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits."""

    plan: Plan
    reason: str

    @property
    def flags(self) -> str:
        """The flags of the layout."""
        config = self.plan.config
        given = [
            f"--tensor-model-parallel-size {self.plan.sizes['tp']}",
            f"--pipeline-model-parallel-size {self.plan.sizes['pp']}",
            f"--zero-stage {config.deepspeed.zero_stage}",
            f"--micro-batch-size {config.schedule.micro_batch_size}",
        ]
        if config.parallel.sequence_parallel:
            given.append("--sequence-parallel")
        if config.recompute.recompute_granularity:
            given.append(f"--recompute-granularity {config.recompute.recompute_granularity}")
        return " ".join(given)


def suggest(config: Config, world_size: int, hardware: Hardware) -> list[Suggestion]:
    """The fastest layout of each tensor- and pipeline-parallel size that fits, best first.

    Args:
        config: Complete configuration; its sizes, ZeRO stage, micro-batch size and recomputation
            are varied, its global batch size is kept.
        world_size: Number of processes.
        hardware: Their devices, with the memory that may be used.
    """
    samples = config.schedule.global_batch_size or config.schedule.micro_batch_size * world_size
    best: list[Plan] = []
    tensor_sizes = [
        size
        for size in divisors(config.model.num_attention_heads)
        if size <= hardware.per_machine and config.model.kv_heads % size == 0
    ]
    pipeline_sizes = [size for size in divisors(world_size) if size <= config.model.num_layers]
    for tp_size, pp_size in itertools.product(tensor_sizes, pipeline_sizes):
        if world_size % (tp_size * pp_size):
            continue
        layout = with_values(
            config,
            tensor_model_parallel_size=tp_size,
            pipeline_model_parallel_size=pp_size,
            sequence_parallel=tp_size > 1 and config.parallel.ds_sequence_parallel_size == 1,
            global_batch_size=samples,
        )
        plans = [
            plan
            for variant in _variants(layout, world_size)
            if (plan := make_plan(variant, world_size, hardware)).memory.peak
            <= MARGIN * hardware.memory
        ]
        best += sorted(plans, key=lambda plan: plan.seconds)[:1]
    best.sort(key=lambda plan: plan.seconds)
    return [Suggestion(plan, _reason(plan, best[0])) for plan in best]


def _variants(config: Config, world_size: int) -> Iterator[Config]:
    """The settings without problems that a layout may have."""
    has_stages = config.parallel.pipeline_model_parallel_size > 1
    for stage, size, recompute in itertools.product(STAGES, MICRO_BATCHES, RECOMPUTATION):
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
    """What the plan's time consists of besides products, or what it loses against the best one."""
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
