"""Reports at the start of a run: arguments, banner, JSON files, startup times, memory.

Collects values from the parts of a run and prints or writes them; changes none of the parts.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path

import torch

from megatron_ds import schedules
from megatron_ds.checkpoint.storage import write_json
from megatron_ds.config import Config
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.data.usage_report import USAGE_FILE
from megatron_ds.engine import memory_estimate
from megatron_ds.engine.protocol import Engine
from megatron_ds.engine.readback import loaded_ops
from megatron_ds.launch import device, distributed, environment, output
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.model.flops import parameters_per_rank
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from megatron_ds.training.attention_kernel import describe_kernel
from megatron_ds.training.banner import MIB, WIDTH, BannerData, banner

DOTS = 48


def print_arguments(config: Config, context: distributed.ProcessContext, mesh: Mesh) -> None:
    """Prints the settings, in the format of Megatron-LM and its forks."""
    output.print_on_rank(
        f"DeepSpeed info: version={metadata.version('deepspeed')}; {context.world_size} processes "
        f"on {context.device.type} ({context.backend}), torch {torch.__version__}, tensor parallel "
        f"{mesh.tp.size} x data parallel {mesh.dp.size}"
    )
    output.print_on_rank("------------------------ arguments ------------------------")
    for group in config.to_dict().values():
        for name, value in group.items():
            output.print_on_rank(f"  {name} {'.' * (DOTS - len(name))} {value}")
    output.print_on_rank("-------------------- end of arguments ---------------------")
    padded, vocab = config.model.padded_vocab(mesh.tp.size), config.model.vocab_size
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


def print_parameter_count(mesh: Mesh, engine: Engine) -> None:
    output.print_on_rank(
        f" > number of parameters on (tensor, pipeline) model parallel rank "
        f"({mesh.tp.rank}, {mesh.pp.rank}): {engine.parameter_count()}"
    )


def estimate_memory(
    config: Config, mesh: Mesh, engine: Engine, device: str
) -> memory_estimate.MemoryEstimate:
    """Estimates the memory of one process.

    Args:
        config: Configuration of the run.
        mesh: Process groups of the run.
        engine: Engine whose settings are in effect.
        device: Type of its device.
    """
    inputs = memory_estimate.memory_inputs(
        config, engine.settings, engine.ds_config["zero_optimization"], mesh.tp.size, device
    )
    return memory_estimate.estimate(config, inputs)


def print_banner(
    config: Config,
    context: distributed.ProcessContext,
    mesh: Mesh,
    engine: Engine,
    state: TrainState,
    estimate: memory_estimate.MemoryEstimate,
) -> None:
    """Prints layout, model, schedule, settings and kernels on the first rank. Not collective."""
    if context.rank != 0:
        return
    micro = config.schedule.micro_batch_size
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
            f"DeepSpeed {metadata.version('deepspeed')}, torch {torch.__version__}, "
            f"Python {platform.python_version()}"
        ),
        device=f"{context.device.type} ({context.backend})",
        threads=torch.get_num_threads(),
        attention=describe_kernel(
            config.model,
            micro,
            mesh.tp.size,
            getattr(torch, engine.settings.param_dtype),
            context.device,
            documents,
        ),
        ops=tuple(loaded_ops()),
    )
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else WIDTH
    output.print_on_rank(banner(facts, width=width, terminal=terminal))


def write_run_files(folder: Path, engine: Engine, data: Datasets) -> None:
    """Writes the DeepSpeed configuration and the usage of each data file to --save."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "ds_config.json", engine.ds_config)
    write_json(folder / USAGE_FILE, [asdict(file) for file in data.usage])


def log_timestamp(label: str) -> None:
    """Prints a point of the run with the time, as Megatron does."""
    output.print_on_rank(f"[{label}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


@dataclass(frozen=True)
class MemoryReport:
    """Compares the memory peak of this process with the estimate and with its states."""

    engine: Engine
    estimate: memory_estimate.MemoryEstimate
    on_cpu: bool
    peak: device.PeakMemory

    def line(self, iteration: int) -> str:
        """Megatron's memory line, extended by the estimate and the states."""
        states = self.engine.state_bytes()
        peak, expected = self.peak.bytes(), self.estimate.peak
        sizes = {
            f"{kind} ({place})": size for place in states for kind, size in states[place].items()
        }
        if self.on_cpu:
            # Host and device share one memory.
            expected += sum(self.estimate.host.values())
            sizes = _merged(states)
        measured = "unknown" if peak is None else f"{peak / MIB:.1f}"
        parts = ", ".join(f"{kind} {size / MIB:.1f}" for kind, size in sizes.items())
        return (
            f"[Rank {environment.rank()}] (after {iteration} iterations) memory (MB) | "
            f"max allocated: {measured} | estimated peak: {expected / MIB:.1f} | "
            f"states: {sum(sizes.values()) / MIB:.1f} ({parts}) |"
        )


@dataclass(frozen=True)
class FirstStepsReport:
    """Prints startup times after the first step and memory after the first log interval."""

    startup: StartupTimer
    memory: MemoryReport | None
    first_iteration: int
    log_interval: int

    def after_step(self, iteration: int) -> None:
        if iteration == self.first_iteration:
            self.startup.mark("first iteration")
            output.print_on_rank(self.startup.summary_line())
        is_first_interval = iteration - self.first_iteration < self.log_interval
        if iteration % self.log_interval == 0 and is_first_interval:
            self.print_memory(iteration)

    def print_memory(self, iteration: int) -> None:
        if self.memory is not None:
            output.print_on_rank(self.memory.line(iteration))


def _merged(states: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    result: dict[str, int] = {}
    for kinds in states.values():
        for kind, size in kinds.items():
            result[kind] = result.get(kind, 0) + size
    return result
