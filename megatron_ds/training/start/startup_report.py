"""Reports at the start of a run: arguments, banner, JSON files, startup times, memory.

Collects values from the parts of a run and prints or writes them; changes none of the parts.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatron_ds import schedules
from megatron_ds.checkpoint.files.local_files import write_json
from megatron_ds.config import Config, ModelConfig, yaml_file
from megatron_ds.config.devices import is_host
from megatron_ds.config.phases import phase_names
from megatron_ds.config.problems import Problem, counted
from megatron_ds.data.blend.usage_report import USAGE_FILE
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.engine.readback import loaded_ops
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.fileio.atomic import write_atomically
from megatron_ds.launch import device, environment, output
from megatron_ds.launch.ranks import distributed
from megatron_ds.launch.ranks.host_variables import describe
from megatron_ds.launch.software import commit
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.model.attention.backends import CALLERS, AttentionOptions, selected_backend
from megatron_ds.model.attention.cores import name_of
from megatron_ds.model.attention.packed import Keys
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.parallel.mesh import Mesh, axis_groups, groups_across_hosts
from megatron_ds.planning.memory_estimate import MemoryEstimate
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers.console import is_short
from megatron_ds.training.loggers.events import EventLog
from megatron_ds.training.start.banner import MIB, WIDTH, BannerData, banner, sections

DOTS = 48


def print_detail(config: Config, text: str) -> None:
    """Prints a line of Megatron's that the short form leaves out: the banner has its values."""
    if not is_short(config):
        output.print_on_rank(text)


def log_timestamp(config: Config, label: str) -> None:
    """Prints a point of the run with the time, as Megatron does."""
    print_detail(config, f"[{label}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S}")


@dataclass(frozen=True)
class StartReport:
    """Reports of what the run is, while it is built. Not collective."""

    config: Config
    context: distributed.ProcessContext
    mesh: Mesh
    folder: Path | None = None
    """Local folder of --save if this process writes files there."""

    def print_arguments(self) -> None:
        """Prints the layout and, with --print-arguments, the settings, as Megatron does."""
        config = self.config
        context = self.context
        mesh = self.mesh
        output.print_on_rank(
            f"DeepSpeed info: version={metadata.version('deepspeed')}; "
            f"{counted(context.world_size, 'process')} on {context.device.type} "
            f"({context.backend}), torch {torch.__version__}, {mesh.describe()}"
        )
        if config.logging.print_arguments:
            output.print_on_rank("------------------------ arguments ------------------------")
            for group in config.to_dict().values():
                for name, value in group.items():
                    output.print_on_rank(f"  {name} {'.' * (DOTS - len(name))} {value}")
            output.print_on_rank("-------------------- end of arguments ---------------------")
        padded = config.model.padded_vocab(mesh.tp.size)
        vocab = config.model.vocab_size
        dummy = f"with {padded - vocab} dummy tokens (new size: {padded})"
        print_detail(config, f" > padded vocab (size: {vocab}) {dummy}")
        schedule = config.schedule
        if schedule.rampup_batch_size is not None:
            start, increment, samples = schedule.rampup_batch_size
            print_detail(
                config,
                f"will use batch size rampup starting from global batch size {start} to global "
                f"batch size {schedule.global_batch_size} with batch size increments {increment} "
                f"over {samples} samples.",
            )
        for label, text in schedules.describe_schedules(config):
            print_detail(config, f"will use {label} {text}.")

    def print_parameter_count(self, engine: ZeroEngine) -> None:
        """Prints the parameters of the first rank, as Megatron does."""
        print_detail(
            self.config,
            f" > number of parameters on (tensor, pipeline) model parallel rank "
            f"({self.mesh.tp.rank}, {self.mesh.pp.rank}): {engine.parameter_count()}",
        )

    def warn_of_hosts(self) -> None:
        """Warns of tensor-parallel groups across hosts, missing variables and unsafe restarts.

        On the first rank, which knows all hosts.
        """
        context = self.context
        parallel = self.config.parallel
        if context.rank != 0:
            return
        groups = axis_groups(context.world_size, parallel.tensor_model_parallel_size)["tp"]
        hosts = [location.host for location in context.locations.values()]
        if across := groups_across_hosts(groups, hosts):
            ranks = ", ".join(map(str, across[0]))
            output.warn_on_rank(
                Problem("tensor-parallel-group-spans-hosts", settings=parallel, ranks=ranks)
            )
        if missing := context.missing_variables:
            output.warn_on_rank(Problem("variables-missing-on-hosts", names=describe(missing)))
        if environment.restarts_with_old_store():
            output.warn_on_rank(Problem("restarts-with-old-store"))

    def print_banner(
        self, engine: ZeroEngine, state: TrainState, estimate: MemoryEstimate
    ) -> dict[str, str]:
        """Prints layout, model, schedule, settings and kernels on the first rank. Not collective.

        Returns:
            What the run is, by a word for it.
        """
        config = self.config
        context = self.context
        mesh = self.mesh
        if context.rank != 0:
            return {}
        for warning in engine.startup_warnings:
            output.warn_on_rank(warning)
        facts = BannerData(
            config=config,
            mesh=mesh,
            settings=engine.settings,
            estimate=estimate,
            state=state,
            versions=(
                f"DeepSpeed {metadata.version('deepspeed')}, torch {torch.__version__}, "
                f"Python {platform.python_version()}"
            ),
            device=f"{context.device.type} ({context.backend})",
            threads=torch.get_num_threads(),
            attention=describe_kernel(
                config.model,
                config.schedule.micro_batch_size,
                config.parallel.head_ranks,
                getattr(torch, engine.settings.param_dtype),
                context.device,
                engine.model.attention,
            ),
            compiled=engine.model.compiled,
            ops=tuple(loaded_ops()),
        )
        terminal = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if terminal else WIDTH
        output.print_on_rank(banner(facts, width=width, terminal=terminal))
        shown = {
            name: "; ".join(": ".join(filter(None, line)) for line in lines)
            for name, lines in sections(facts).items()
        }
        data = [value for name, value in vars(config.data).items() if name.endswith("_path")]
        return {
            **{name: shown[name] for name in ("model", "batch", "schedule", "layout", "in effect")},
            "data": next((" ".join(item) for item in data if item and isinstance(item, tuple)), ""),
            "software": f"{facts.versions}, commit {commit() or 'unknown'}",
            "machine": f"{platform.node()}, {platform.machine()}, {os.cpu_count()} CPUs",
            "command": shlex.join(sys.argv),
        }

    def write_run_files(self, engine: ZeroEngine, data: Iterable[Datasets], phase: int) -> None:
        """Writes the DeepSpeed configuration and the usage of each data file to --save.

        Args:
            engine: Engine of the run.
            data: Datasets of the current phase and the later ones.
            phase: Position of the current one; the file keeps the usage of those before it.
        """
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "ds_config.json", engine.ds_config)
        path = self.folder / USAGE_FILE
        usage = list[dict[str, Any]]()
        finished = phase_names(self.config)[:phase]
        with suppress(OSError, ValueError, LookupError, TypeError):  # missing or damaged
            usage += [item for item in json.loads(path.read_bytes()) if item["stage"] in finished]
        usage += [asdict(file) for datasets in data for file in datasets.usage]
        write_json(path, usage)

    def write_settings(self, config: Config) -> None:
        """Writes the settings to --save, for --config."""
        if self.folder is not None:
            write_atomically(self.folder / yaml_file.FILE_NAME, yaml_file.dump(config).encode())


def report_phase(events: EventLog, phases: RunPhases, state: TrainState) -> None:
    """Prints and records the start of a phase."""
    name, text = next(phases.describe(state))
    events.record("stage", iteration=state.iteration, text=f"{name}: {text}")
    output.print_on_rank(f" > stage {name}: {text}")


@dataclass(frozen=True)
class FirstStepsReport:
    """Prints startup times after the first step and memory after the first log interval.

    The memory peak of this process is compared with the estimate and with its states.
    """

    startup: StartupTimer
    engine: ZeroEngine
    estimate: MemoryEstimate
    peak: device.PeakMemory
    start_iteration: int
    config: Config
    events: EventLog

    def after_step(self, iteration: int) -> None:
        self.events.step(iteration)
        if iteration == self.start_iteration + 1:
            self.startup.mark("first iteration")
            phases = {name: round(seconds, 3) for name, seconds in self.startup.phases}
            self.events.record("start-up", iteration=iteration, seconds=phases)
            output.print_on_rank(self.startup.summary_line(is_short(self.config)))
        log_interval = self.config.logging.log_interval
        is_first_interval = iteration - self.start_iteration <= log_interval
        if iteration % log_interval == 0 and is_first_interval:
            self.print_memory(iteration)

    def print_memory(self, iteration: int) -> None:
        """Megatron's memory line, extended by the estimate and the states."""
        peak = self.peak.bytes()
        expected = self.estimate.peak
        self.events.record("memory", iteration=iteration, peak=peak)
        if self.peak.on_host:  # host and device share one memory
            expected += sum(self.estimate.host.values())
        sizes: Counter[str] = Counter()
        for memory, kinds in self.engine.state_bytes().items():
            for category, size in kinds.items():
                sizes[category if self.peak.on_host else f"{category} ({memory})"] += size
        measured = "unknown" if peak is None else f"{peak / MIB:.1f}"
        parts = ", ".join(f"{category} {size / MIB:.1f}" for category, size in sizes.items())
        if is_short(self.config):
            output.print_on_rank(
                f" memory of rank 0 in MiB: {measured} at its peak (estimated "
                f"{expected / MIB:.1f}), {sum(sizes.values()) / MIB:.1f} between steps"
            )
            return
        output.print_on_rank(
            f"[Rank {environment.rank()}] (after {iteration} iterations) memory (MB) | "
            f"max allocated: {measured} | estimated peak: {expected / MIB:.1f} | "
            f"states: {sum(sizes.values()) / MIB:.1f} ({parts}) |"
        )


def describe_kernel(
    config: ModelConfig,
    micro_batch: int,
    shards: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionOptions = CALLERS,
) -> str:
    """Name the function that computes attention, and the kernel that torch selects for it.

    Args:
        config: Architecture.
        micro_batch: Samples of a micro-batch.
        shards: Ranks that share the heads: tensor- and sequence-parallel ones.
        dtype: Type of the activations.
        device: Device of the activations.
        attention: Attention backend.
    """
    keys = Keys(config.seq_length, dtype, device, attention.has_documents)
    texts = []
    for rule in attention_rules(config):
        backend = attention.backend(rule, keys)
        text = backend.name
        order = getattr(backend, "order", None)
        if order is not None:
            batch = 1 if keys.has_documents else micro_batch
            text += f": {selected_backend(rule, config, batch, shards, dtype, device, order)}"
            text += "" if is_host(device.type) else f" (first of {', '.join(map(name_of, order))})"
        else:
            subject = "ALiBi" if rule.alibi else "windows"
            subject = "changed scores" if rule.needs_scores else subject
            text += " within documents" if keys.has_documents else f" with {subject}"
        texts.append(text)
    return ", ".join(dict.fromkeys(texts))
