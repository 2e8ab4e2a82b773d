"""Builds the parts of a run: data, model and engine, checkpoint, loggers.

Owns the order of construction. Collective: every rank calls the same functions.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import Checkpoint
from megatron_ds.config import Config
from megatron_ds.config.phases import phase_names
from megatron_ds.config.problems import user_error
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.blend.usage_report import USAGE_FILE, describe_blend, summary
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.evaluation.in_training import TaskEvaluation
from megatron_ds.launch import device, output
from megatron_ds.launch.device import sum_dtype
from megatron_ds.launch.process.lifecycle import ProcessLifecycle
from megatron_ds.launch.ranks import distributed
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.model.declaration.architecture import run_spec
from megatron_ds.model.layers import CustomParts
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.planning.memory_estimate import MemoryEstimate, planned_memory
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import TrainState
from megatron_ds.training.exit_conditions import ExitConditions
from megatron_ds.training.extensions import Callback, Extensions, RunControl
from megatron_ds.training.loggers.console import Console, ShortConsole, is_short, time_details
from megatron_ds.training.loggers.events import EventLog
from megatron_ds.training.loggers.selection import open_loggers
from megatron_ds.training.loggers.step_records import StepRecordLog
from megatron_ds.training.metrics import Metrics, ThroughputModel
from megatron_ds.training.profile.profiling import open_profiling
from megatron_ds.training.records import Logger
from megatron_ds.training.run_record import RunRecorder
from megatron_ds.training.start.preflight import RunInputs
from megatron_ds.training.start.run_data import build_phase_data
from megatron_ds.training.start.startup_report import (
    FirstStepsReport,
    StartReport,
    log_timestamp,
    print_detail,
    report_phase,
)
from megatron_ds.training.trainer import Trainer


@dataclass(frozen=True)
class RunParts:
    """The parts of a run that its other parts are built from."""

    config: Config
    inputs: RunInputs
    extensions: Extensions
    context: distributed.ProcessContext
    mesh: Mesh
    life: ProcessLifecycle
    startup: StartupTimer
    events: EventLog
    report: StartReport
    checkpoints: CheckpointManager
    may_write: Callable[[], bool]
    """Whether --save still belongs to this run."""
    recorder: RunRecorder = dataclasses.field(default_factory=RunRecorder)
    """Records the run for its program, on every rank."""

    @property
    def save(self) -> Path | None:
        """The local folder of --save."""
        return self.inputs.plan.folders.local_save


@dataclass(frozen=True)
class _Start:
    """Start of a run: from its own checkpoint, an imported one, or nothing."""

    checkpoint: Checkpoint | None = None
    imported: InitialLoad | None = None

    @property
    def is_new(self) -> bool:
        return self.checkpoint is None and self.imported is None

    @property
    def state(self) -> TrainState:
        if self.checkpoint is not None:
            return self.checkpoint.run.state
        return TrainState() if self.imported is None else self.imported.state

    @property
    def history(self) -> BlendHistory | None:
        """Training data that was read before the start of this process; None without a
        checkpoint."""
        return None if self.checkpoint is None else self.checkpoint.run.data

    def position(self, entered: TrainState, excluded: str | None) -> dict[str, Any]:
        """Values that determine the samples of the run, for `EventLog`: the state before its first
        step, the training data read so far, and the list of excluded documents."""
        state = dataclasses.replace(entered, recent_losses=(), recent_norms=())
        text = excluded and Path(excluded).read_text(encoding="utf-8")
        data = self.history and self.history.to_dict()
        return {"state": state.to_dict(), "data": data, "excluded": text}

    def load(self, engine: ZeroEngine, parts: RunParts) -> TrainState:
        """Fills the engine with it. Collective."""
        state = self.state
        if self.checkpoint is not None:
            state = parts.checkpoints.restoring.load(engine, self.checkpoint)
        if self.imported is not None:
            engine.reshard(self.imported)
            for note in self.imported.notes:
                output.warn_on_rank(note)
            output.print_on_rank(f"  loaded the {self.imported.summary}")
        if (source := self.checkpoint or self.imported) is not None:
            if not engine.has_finite_weights():
                raise user_error("weights-not-finite", path=source.path)
            parts.startup.mark("checkpoint")
        return state


def build_trainer(parts: RunParts) -> Trainer:
    """Builds all parts of a run and restores its checkpoint, if there is one.

    Raises:
        UserError: If the checkpoint or the data does not fit the run.
    """
    config = parts.config
    mesh = parts.mesh
    report = parts.report
    start = _find_start(parts)
    phases = RunPhases(config, mesh.dp.size)
    entered = phases.entered(start.state)
    data, *later_data = _build_data(parts, start, entered)
    parts.startup.mark("data")
    peak = device.PeakMemory()
    custom = CustomParts(parts.extensions.loss, parts.extensions.layer)
    engine = build_engine(
        config, mesh, parts.context.device, init_weights=start.is_new, parts=custom
    )
    engine.enter_phase(phases.at(entered).model)
    peak.restart()  # without the trials of compiled functions, which the estimate leaves out
    parts.startup.mark("model and engine")
    report.print_parameter_count(engine)
    state = phases.entered(start.load(engine, parts))
    log_timestamp(config, "after model, optimizer, and learning rate scheduler are built")
    estimate = _largest_memory(parts)
    about = report.print_banner(engine, state, estimate)
    last = state.iteration
    if config.evaluation.trains:
        last = phases.total_iterations(state)
    if report.folder is not None:
        # Before the loggers, which truncate their files: an error here leaves them as they were.
        report.write_run_files(engine, (data, *later_data), state.stage)
        parts.checkpoints.saving.start_branch(start.checkpoint)
        position = start.position(entered, config.data.exclude_documents)
        _record_start(parts, report.folder, position, state, last)
        parts.events.record("about", lines=about)
    exits = _exit_conditions(parts, last)
    control = _control_of(parts.extensions.callbacks, state)
    return Trainer(
        config=config,
        mesh=mesh,
        engine=engine,
        data=data,
        later_data=later_data,
        metrics=_build_metrics(parts, engine, state, exits),
        checkpoints=parts.checkpoints,
        exits=exits,
        state=state,
        total_iterations=last,
        report=FirstStepsReport(
            parts.startup, engine, estimate, peak, state.iteration, config, parts.events
        ),
        profiling=open_profiling(config, engine, parts.save, parts.context.rank, state, last),
        callbacks=(*parts.extensions.callbacks, *_record_logs(parts)),
        control=control,
        tasks=_build_tasks(parts, engine),
        token_bytes=_token_bytes(parts) if data.valid or data.test else None,
        watch=parts.life.hang_watch,
    )


def _control_of(callbacks: Sequence[Callback], state: TrainState) -> RunControl | None:
    """Gives the callbacks what they control the run with; None without callbacks."""
    factor = state.learning_rate_factor
    if factor != 1.0:
        output.print_on_rank(f"  learning rate factor {factor:g}, which a callback has set")
    if not callbacks:
        return None
    control = RunControl()
    control.learning_rate_factor = factor
    for callback in callbacks:
        callback.control = control
    return control


def _record_start(
    parts: RunParts, folder: Path, position: Mapping[str, Any], state: TrainState, last: int
) -> None:
    """Writes the first event of the run.

    Args:
        parts: The parts of the run.
        folder: Folder of the events.
        position: Where the run starts in its data.
        state: State at the start.
        last: The last iteration.
    """
    facts = {**position, "total_iterations": last, "ranks": parts.context.world_size}
    parts.events.start(folder, parts.config, state.iteration, **facts)


def _record_logs(parts: RunParts) -> Iterator[Callback]:
    """The log of --record-every, on the last rank, which writes files."""
    context = parts.context
    if parts.config.logging.record_every and context.rank == context.world_size - 1:
        yield StepRecordLog(parts.config, parts.save, parts.may_write)


def _largest_memory(parts: RunParts) -> MemoryEstimate:
    """The memory of the phase that needs the most."""
    dp_size = parts.mesh.dp.size
    device_type = parts.context.device.type
    estimates = (planned_memory(item, dp_size, device_type) for item in parts.config.phase_configs)
    return max(estimates, key=lambda estimate: estimate.peak)


def _exit_conditions(parts: RunParts, last: int) -> ExitConditions:
    """The conditions that end a run before its last iteration. Collective."""
    config = parts.config
    life = parts.life
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    hosts = distributed.create_host_group(timeout)
    return ExitConditions(
        config.stopping,
        last,
        life.stop_request,
        hosts,
        life.started_at,
        progress=life.hang_watch.progress,
    )


def _find_start(parts: RunParts) -> _Start:
    plan = parts.inputs.plan
    if plan.imported is not None:
        return _Start(imported=InitialLoad.of(plan.imported, parts.config))
    start = _Start()
    if plan.folders.load is not None:
        start = _Start(parts.checkpoints.restoring.select())
        parts.startup.mark("checkpoint's check")
    if start.is_new and parts.config.evaluation.eval_only is not None:
        raise user_error("no-checkpoint-to-evaluate")
    return start


def _build_tasks(parts: RunParts, engine: ZeroEngine) -> TaskEvaluation | None:
    """The evaluation of --eval-tasks and --eval-only, whose data is loaded here."""
    config = parts.config
    mesh = parts.mesh
    options = parts.config.evaluation
    if not (options.file_tasks or options.harness_tasks):
        return None
    return TaskEvaluation(
        options,
        engine.inference_model,
        mesh,
        parts.inputs.tokenizer,
        config.model.seq_length,
        config.schedule.micro_batch_size,
        in_lockstep=engine.settings.zero_stage == 3 or mesh.ep.size > 1,
        device=parts.context.device,
    )


def _token_bytes(parts: RunParts) -> torch.Tensor | None:
    """Bytes of the tokens' text, unless another loss than the cross entropy is computed."""
    if parts.extensions.loss is not None:
        return None
    sizes = parts.inputs.tokenizer.token_bytes()
    return None if sizes is None else torch.tensor(sizes, device=parts.context.device)


def mean_over_group(values: list[float], *, group: Group, device: torch.device) -> list[float]:
    """Element-wise mean over the ranks of a group, in one all-reduce."""
    if group.size == 1:
        return values
    total = torch.tensor(values, dtype=sum_dtype(device.type), device=device)
    dist.all_reduce(total, group=group.handle)
    mean: list[float] = (total / group.size).tolist()
    return mean


def times_of_ranks(engine: ZeroEngine) -> dict[str, list[float]]:
    """The times of the engines of all ranks, by name, in the order of the ranks. Collective."""
    times = gather_objects(engine.step_times())
    names = dict.fromkeys(name for rank_times in times for name in rank_times)
    return {name: [rank[name] for rank in times if name in rank] for name in names}


def _build_data(parts: RunParts, start: _Start, entered: TrainState) -> list[Datasets]:
    """Builds the datasets of the current phase and of the later ones, continued from a checkpoint.

    The blend of a phase continues the blend of the previous phase.
    """
    if parts.config.evaluation.eval_only is not None:
        return [Datasets(None)]
    history = start.history
    built = list[Datasets]()
    phases = RunPhases(parts.config, parts.mesh.dp.size)
    if entered.stage != start.state.stage:
        report_phase(parts.events, phases, entered)
    for before in phases.starts(entered):
        if built and built[-1].progress is not None:
            history = built[-1].progress.history_after(before.consumed_samples)
        built.append(_build_datasets(parts, before, history))
    log_timestamp(parts.config, "after dataloaders are built")
    return built


def _build_datasets(parts: RunParts, state: TrainState, history: BlendHistory | None) -> Datasets:
    """Builds the datasets of a phase and prints their composition."""
    phases = RunPhases(parts.config, parts.mesh.dp.size)
    inputs = parts.inputs
    save = parts.save
    config = phases.at(state)
    num_samples = phases.planned_samples(state)
    names = phase_names(parts.config)
    dataset_label = f" for stage {names[state.stage]}" if names else " for GPT"
    print_detail(config, f" > building train, validation, and test datasets{dataset_label} ...")
    for name, samples in zip(("train", "validation", "test"), num_samples, strict=True):
        print_detail(config, f"    {name + ':':<12}{samples}")
    data = build_phase_data(
        parts.config, inputs, parts.mesh.dp.size, state, history, parts.extensions.dataset
    )
    lines = [*summary(data.usage, None if save is None else str(save / USAGE_FILE))]
    if data.progress is not None and len(data.progress.history.phases) > 1:
        lines.append(describe_blend(data.progress.history))
    for line in lines:
        output.print_on_rank(f"    {line}")
    for line in () if state.stage_start[0] == state.iteration > 0 else data.changes:
        output.print_on_rank(line)
    return data


def _build_metrics(
    parts: RunParts, engine: ZeroEngine, state: TrainState, exits: ExitConditions
) -> Metrics:
    """Metrics of this rank. The first rank, which prints the other lines of the log, prints them,
    so that lines keep their order; the last one writes files, as in Megatron."""
    config = parts.config
    mesh = parts.mesh
    context = parts.context
    phases = RunPhases(config, mesh.dp.size)
    total_iterations = phases.total_iterations(state)
    loggers: list[Logger] = [parts.recorder]
    if context.rank == 0:
        write = output.print_on_rank
        hosts = [host.name for host in context.locations.values()]
        details = functools.partial(time_details, config.profiling, hosts)
        loggers.append(
            ShortConsole(write, total_iterations, details)
            if is_short(config)
            else Console(write, details)
        )
    if context.rank == context.world_size - 1:
        loggers += open_loggers(
            config,
            state,
            save=parts.save,
            world_size=context.world_size,
            dp_size=mesh.dp.size,
            write=lambda text: output.print_on_rank(text, rank_to_print=-1),
            memory=device.device_memory,
            more=parts.extensions.loggers,
            may_write=parts.may_write,
        )
    return Metrics(
        ThroughputModel(
            flops_per_sample=run_spec(config).flops,
            seq_length=phases.at(state).model.seq_length,
            world_size=context.world_size,
            curriculum=config.lengths_vary,
        ),
        log_interval=config.logging.log_interval,
        total_iterations=total_iterations,
        seconds_left=lambda state, rate: exits.seconds_left(phases.tokens_left(state) / rate),
        mean_over_dp=functools.partial(mean_over_group, group=mesh.replicas, device=context.device),
        params_norm=engine.params_norm if config.logging.log_params_norm else None,
        step_times=(
            functools.partial(times_of_ranks, engine) if config.profiling.times_parts else None
        ),
        loggers=loggers,
    )
