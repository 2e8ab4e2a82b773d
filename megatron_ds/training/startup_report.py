"""What a run says of itself before its first step, and of its memory: gathered here, then printed.

Knows the parts of a run that is put together, and changes none of them.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.engine import memory_estimate
from megatron_ds.engine.protocol import Engine
from megatron_ds.engine.readback import loaded_ops
from megatron_ds.launch import device, distributed, environment, output
from megatron_ds.model.attention import describe_kernel
from megatron_ds.model.flops import parameters_per_rank
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from megatron_ds.training.banner import MIB, BannerData, banner

DOTS = 48


def print_arguments(config: Config, here: distributed.ProcessContext, mesh: Mesh) -> None:
    """The lines that users look for at a run's start."""
    output.print_on_rank(
        f"DeepSpeed info: version={device.deepspeed_version()}; {here.world_size} processes on "
        f"{here.device.type} ({here.backend}), torch {torch.__version__}, tensor parallel "
        f"{mesh.tp.size} x data parallel {mesh.dp.size}"
    )
    output.print_on_rank("------------------------ arguments ------------------------")
    for group in config.to_dict().values():
        for name, value in group.items():
            output.print_on_rank(f"  {name} {'.' * (DOTS - len(name))} {value}")
    output.print_on_rank("-------------------- end of arguments ---------------------")
    padded, vocab = config.model.padded_vocab(mesh.tp.size), config.model.vocab
    output.print_on_rank(
        f" > padded vocab (size: {vocab}) with {padded - vocab} dummy tokens (new size: {padded})"
    )
    schedule = config.schedule
    if schedule.rampup_batch_size is not None:
        start, increment, samples = schedule.rampup_batch_size
        output.print_on_rank(
            f"will use batch size rampup starting from global batch size {start} to global batch "
            f"size {schedule.global_batch_size} with batch size increments {increment} over "
            f"{samples} samples."
        )
    for label, text in schedules.describe_schedules(config):
        output.print_on_rank(f"will use {label} {text}.")


def estimate_memory(
    config: Config, mesh: Mesh, engine: Engine, device: str
) -> memory_estimate.MemoryEstimate:
    """What a process of this run should take. device: its kind."""
    inputs = memory_estimate.memory_inputs(
        config, engine.settings, engine.ds_config["zero_optimization"], mesh.tp.size, device
    )
    return memory_estimate.estimate(config, inputs)


def print_banner(
    config: Config,
    here: distributed.ProcessContext,
    mesh: Mesh,
    engine: Engine,
    state: TrainState,
    estimate: memory_estimate.MemoryEstimate,
) -> None:
    """The screen that tells what runs. On the first rank; no collective."""
    if not here.is_first:
        return
    micro = config.schedule.micro_batch_size
    assert micro is not None
    documents = engine.packing
    if documents is not None and documents.flex_unavailable_reason:
        output.print_on_rank(
            f" > attention runs document by document: {documents.flex_unavailable_reason}"
        )
    facts = BannerData(
        config=config,
        mesh=mesh,
        settings=engine.settings,
        estimate=estimate,
        parameters=parameters_per_rank(config.model, mesh.tp.size),
        state=state,
        total_iterations=schedules.total_iterations(config, mesh.dp.size, state),
        versions=(
            f"DeepSpeed {device.deepspeed_version()}, torch {torch.__version__}, "
            f"Python {platform.python_version()}"
        ),
        device=f"{here.device.type} ({here.backend})",
        threads=torch.get_num_threads(),
        attention=describe_kernel(
            config.model,
            micro,
            mesh.tp.size,
            getattr(torch, engine.settings.param_dtype),
            here.device,
            documents,
        ),
        ops=tuple(loaded_ops()),
    )
    width, terminal = output.terminal_size()
    output.print_on_rank(banner(facts, width=width, terminal=terminal))


@dataclass(frozen=True)
class MemoryReport:
    """Compares what this process has taken with the sum of its states, and with the estimate."""

    engine: Engine
    estimate: memory_estimate.MemoryEstimate
    on_cpu: bool
    peak: device.PeakMemory

    def line(self, iteration: int) -> str:
        """Megatron's line, with what was expected beside what was measured."""
        states = self.engine.state_bytes()
        peak, expected = self.peak.bytes(), self.estimate.peak
        held = {
            f"{kind} ({place})": size for place in states for kind, size in states[place].items()
        }
        if self.on_cpu:
            # Host and device are one memory.
            expected += sum(self.estimate.host.values())
            held = _merged(states)
        measured = "not known" if peak is None else f"{peak / MIB:.1f}"
        parts = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in held.items())
        return (
            f"[Rank {environment.rank()}] (after {iteration} iterations) memory (MB) | "
            f"max allocated: {measured} | estimated peak: {expected / MIB:.1f} | "
            f"states: {sum(held.values()) / MIB:.1f} ({parts}) |"
        )


def _merged(states: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for kinds in states.values():
        for kind, size in kinds.items():
            result[kind] = result.get(kind, 0) + size
    return result
