"""Puts a run together: process group, data, model and engine, checkpoint, loggers.

Owns the order of construction. Collective: every rank calls the same functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ds import schedules
from megatron_ds.checkpoint.collective_io import CollectiveIO
from megatron_ds.checkpoint.folder_checks import claimed_folders
from megatron_ds.checkpoint.local.checkpoints import LocalCheckpoints
from megatron_ds.checkpoint.manager import CheckpointManager, StoredTokenizer
from megatron_ds.checkpoint.metadata import Checkpoint
from megatron_ds.checkpoint.store.claim import claimed_stores
from megatron_ds.config import Config
from megatron_ds.config.problems import user_error
from megatron_ds.data.build_datasets import Datasets, build_datasets, build_once_per_host
from megatron_ds.data.map_dataset import build_own_datasets
from megatron_ds.data.usage_report import USAGE_FILE, describe_blend, summary
from megatron_ds.engine.build import build_engine
from megatron_ds.engine.deepspeed.patches import require_precision
from megatron_ds.engine.protocol import Engine
from megatron_ds.evaluation.in_training import TaskEvaluation
from megatron_ds.fileio.host_reader import HostReader
from megatron_ds.launch import device, distributed, output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.hang_watch import HangWatch
from megatron_ds.launch.host_watch import HostWatch
from megatron_ds.launch.lifecycle import POLL_S, ProcessLifecycle
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.launch.stop_request import StopReason
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.model.layers import CustomParts
from megatron_ds.model.spec.architecture import run_spec
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.planning.memory_estimate import planned_memory
from megatron_ds.tokenizer.stored_files import read_files
from megatron_ds.train_state import TrainState
from megatron_ds.training.events import EventLog
from megatron_ds.training.exit_conditions import ExitConditions
from megatron_ds.training.extensions import Extensions
from megatron_ds.training.loggers import (
    Console,
    ShortConsole,
    is_short,
    open_loggers,
    owned_tensorboard_folder,
    time_details,
)
from megatron_ds.training.metrics import Metrics, ThroughputModel
from megatron_ds.training.preflight import RunInputs
from megatron_ds.training.profiling import open_profiling
from megatron_ds.training.records import Logger
from megatron_ds.training.startup_report import (
    FirstStepsReport,
    log_timestamp,
    print_arguments,
    print_banner,
    print_detail,
    print_parameter_count,
    warn_of_hosts,
    write_run_files,
    write_settings,
)
from megatron_ds.training.trainer import Trainer


def pretrain(
    config: Config,
    inputs: RunInputs,
    extensions: Extensions,
    life: ProcessLifecycle,
    startup: StartupTimer,
) -> ExitCode:
    """Runs one process of a training run.

    Errors propagate as exceptions; only a clean finish destroys the process group.

    Args:
        config: Configuration without problems.
        inputs: Tokenizer and data files that the checks of this process have opened.
        extensions: Parts of the run that its program brings.
        life: Handles signals and the loss of other processes.
        startup: Measures the phases of the start.
    """
    settings, config = config, config.with_vocab(inputs.tokenizer.vocab_size)
    require_precision(config.precision)
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    meeting = functools.partial(life.rendezvous, timeout)
    with life.limited_start(timeout):
        context = distributed.init_distributed(config.runtime, meeting, life.roll_call)
        _watch_ranks(life, config, context, inputs.plan.folders.local_save)
    startup.mark("process group")
    ranks, folders, events = CollectiveIO(), inputs.plan.folders, EventLog(output.print_on_rank)
    with (
        output.recording(events.warning),
        claimed_folders(folders, ranks, output.print_on_rank) as lock,
        claimed_stores(folders, ranks, output.print_on_rank) as stores,
        owned_tensorboard_folder(config.logging, ranks),
    ):
        if (owned := stores.lock or lock) is not None:
            owned.on_lost = functools.partial(life.stop_request.request, StopReason.FOLDER_LOST)
        writes = context.rank == 0 and folders.save is not None
        files = read_files(config.tokenizer) if writes else {}
        tokenizer = StoredTokenizer(inputs.tokenizer.fingerprint, files)
        local = LocalCheckpoints.open(config.checkpoint, ranks, output.warn_on_rank)
        checkpoints = functools.partial(
            CheckpointManager,
            ranks=ranks,
            lock=owned,
            folders=folders,
            tokenizer=tokenizer,
            stores=stores,
            local=local,
            on_saved=functools.partial(events.record, "checkpoint"),
        )
        trainer = build_trainer(
            config, inputs, extensions, context, life, startup, events, checkpoints
        )
        if context.rank == 0 and folders.local_save and config.logging.eval_only is None:
            write_settings(folders.local_save, settings)
        life.on_training_started(saves=folders.save is not None)
        code = _run(trainer, events)
        dist.barrier()  # the folder is free once no rank writes to it
        life.on_finished()
    distributed.destroy_process_group()
    return code


def _watch_ranks(
    life: ProcessLifecycle, config: Config, context: distributed.ProcessContext, save: Path | None
) -> None:
    """Starts watching the other ranks, their hosts, and whether the run makes progress."""
    limits = config.runtime
    folder = Path(config.logging.log_dir or save or "")
    patient_s = 60 * limits.distributed_timeout_minutes
    life.hang_watch = HangWatch(limits.hang_timeout, patient_s, folder)
    life.host_watch = HostWatch(context.locations, context.rank, limits.host_timeout, POLL_S)
    life.on_group_joined(*distributed.watched_peers(context))


def _run(trainer: Trainer, events: EventLog) -> ExitCode:
    """Trains, and records how the run ends."""
    try:
        code = trainer.run()
    except BaseException as error:
        trainer.checkpoints.abandon()  # before the folder is free
        events.record("end", iteration=trainer.state.iteration, error=output.error_message(error))
        raise
    events.record("end", iteration=trainer.state.iteration, status=int(code))
    return code


@dataclass(frozen=True)
class _Start:
    """What a run continues: a checkpoint of its own, an imported one, or nothing."""

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

    def load(
        self, engine: Engine, checkpoints: CheckpointManager, startup: StartupTimer
    ) -> TrainState:
        """Fills the engine with it. Collective."""
        state = self.state
        if self.checkpoint is not None:
            state = checkpoints.load(engine, self.checkpoint)
        if self.imported is not None:
            engine.reshard(self.imported)
            for note in self.imported.notes:
                output.warn_on_rank(note)
            output.print_on_rank(f"  loaded the {self.imported.summary}")
        if (source := self.checkpoint or self.imported) is not None:
            if not engine.has_finite_weights():
                raise user_error("weights-not-finite", path=source.path)
            startup.mark("checkpoint")
        return state


def build_trainer(
    config: Config,
    inputs: RunInputs,
    extensions: Extensions,
    context: distributed.ProcessContext,
    life: ProcessLifecycle,
    startup: StartupTimer,
    events: EventLog,
    open_checkpoints: Callable[..., CheckpointManager],
) -> Trainer:
    """Builds all parts of a run and restores its checkpoint, if there is one.

    Raises:
        UserError: If the checkpoint or the data does not fit the run.
    """
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    mesh = Mesh.build(**config.axis_sizes, timeout=timeout)
    print_arguments(config, context, mesh)
    warn_of_hosts(config, context)
    checkpoints = open_checkpoints(config, mesh, output.print_on_rank)
    eod, plan, save = inputs.tokenizer.eod, inputs.plan, inputs.plan.folders.local_save
    start = _find_start(config, plan, checkpoints, startup)
    data = _build_data(config, inputs, extensions, mesh, start)
    startup.mark("data")
    peak = device.PeakMemory()
    parts = CustomParts(extensions.loss, extensions.layer)
    engine = build_engine(config, mesh, context.device, eod, init_weights=start.is_new, parts=parts)
    peak.restart()  # without the trials of compiled functions, which the estimate leaves out
    startup.mark("model and engine")
    print_parameter_count(config, mesh, engine)
    state = start.load(engine, checkpoints, startup)
    log_timestamp(config, "after model, optimizer, and learning rate scheduler are built")
    estimate = planned_memory(config, mesh.dp.size, context.device.type)
    about = print_banner(config, context, mesh, engine, state, estimate)
    last = _last_iteration(config, mesh, state)
    if save is not None and context.rank == 0 and config.logging.eval_only is None:
        # Before the loggers, which truncate their files: an error here leaves them as they were.
        write_run_files(save, engine, data)
        checkpoints.start_branch(start.checkpoint)
        events.start(save, config, state.iteration, last, context.world_size)
        events.record("about", lines=about)
    exits = _exit_conditions(config, last, life, timeout)
    return Trainer(
        config=config,
        mesh=mesh,
        engine=engine,
        data=data,
        metrics=_build_metrics(config, save, mesh, engine, state, context, exits, extensions),
        checkpoints=checkpoints,
        exits=exits,
        state=state,
        total_iterations=last,
        eod=eod if config.data.eod_mask_loss else None,
        report=FirstStepsReport(startup, engine, estimate, peak, state.iteration, config, events),
        profiling=open_profiling(config, engine, save, context.rank, state, last),
        callbacks=tuple(extensions.callbacks),
        tasks=_build_tasks(config, inputs, engine, mesh, context.device),
        watch=life.hang_watch,
    )


def _last_iteration(config: Config, mesh: Mesh, state: TrainState) -> int:
    if not config.logging.trains:
        return state.iteration
    return schedules.total_iterations(config, mesh.dp.size, state)


def _exit_conditions(
    config: Config, last: int, life: ProcessLifecycle, timeout: timedelta
) -> ExitConditions:
    """The conditions that end a run before its last iteration. Collective."""
    hosts = distributed.create_host_group(timeout)
    return ExitConditions(
        *(config.logging, last, life.stop_request, hosts, life.started_at),
        progress=life.hang_watch.progress,
    )


def _find_start(
    config: Config, plan: LoadPlan, checkpoints: CheckpointManager, startup: StartupTimer
) -> _Start:
    if plan.imported is not None:
        return _Start(imported=InitialLoad.of(plan.imported, config))
    start = _Start()
    if plan.folders.load is not None:
        start = _Start(checkpoints.select())
        startup.mark("checkpoint's check")
    if start.is_new and config.logging.eval_only is not None:
        raise user_error("no-checkpoint-to-evaluate")
    return start


def _build_tasks(
    config: Config, inputs: RunInputs, engine: Engine, mesh: Mesh, on: torch.device
) -> TaskEvaluation | None:
    """The evaluation of --eval-tasks and --eval-only, whose data is loaded here."""
    logging = config.logging
    if not (logging.file_tasks or logging.harness_tasks):
        return None
    return TaskEvaluation(
        logging,
        engine.inference_model,
        mesh,
        inputs.tokenizer,
        config.model.seq_length,
        config.schedule.micro_batch_size,
        in_lockstep=engine.settings.zero_stage == 3 or mesh.ep.size > 1,
        device=on,
    )


def mean_over_group(values: list[float], *, group: Group, device: torch.device) -> list[float]:
    """Element-wise mean over the ranks of a group, in one float64 all-reduce."""
    if group.size == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group.handle)
    mean: list[float] = (total / group.size).tolist()
    return mean


def times_of_ranks(engine: Engine) -> dict[str, list[float]]:
    """The times of the engines of all ranks, by name, in the order of the ranks. Collective."""
    times: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(times, engine.step_times())
    names = dict.fromkeys(name for of_rank in times for name in of_rank)
    return {name: [each[name] for each in times if name in each] for name in names}


def _build_data(
    config: Config, inputs: RunInputs, extensions: Extensions, mesh: Mesh, start: _Start
) -> Datasets:
    """Builds the datasets, continuing those of a checkpoint, and prints their composition."""
    if config.logging.eval_only is not None:
        return Datasets(None)
    print_detail(config, " > building train, validation, and test datasets for GPT ...")
    num_samples = schedules.planned_samples(config, mesh.dp.size, start.state)
    for name, samples in zip(("train", "validation", "test"), num_samples, strict=True):
        print_detail(config, f"    {name + ':':<12}{samples}")
    history = None if start.checkpoint is None else start.checkpoint.run.data
    if extensions.dataset is not None:
        return build_own_datasets(
            extensions.dataset,
            seq_length=config.model.seq_length,
            seed=config.runtime.seed,
            num_samples=num_samples,
            tokenizer=inputs.tokenizer,
            history=history,
            consumed=start.state.consumed_samples,
        )
    save = inputs.plan.folders.local_save
    build = functools.partial(
        build_datasets,
        inputs.data,
        seq_length=config.model.seq_length,
        seed=config.runtime.seed,
        num_samples=num_samples,
        tokenizer_fingerprint=inputs.tokenizer.fingerprint.digest,
        vocab_size=inputs.tokenizer.vocab_size,
        fallback_cache=None if save is None else str(save / "index-cache"),
        history=history,
        consumed=start.state.consumed_samples,
    )
    data = build_once_per_host(build, inputs.host or HostReader())
    lines = [*summary(data.usage, None if save is None else str(save / USAGE_FILE))]
    if data.progress is not None and len(data.progress.history.phases) > 1:
        lines.append(describe_blend(data.progress.history))
    for line in lines:
        output.print_on_rank(f"    {line}")
    for line in data.changes:
        output.print_on_rank(line)
    log_timestamp(config, "after dataloaders are built")
    return data


def _build_metrics(
    config: Config,
    save: Path | None,
    mesh: Mesh,
    engine: Engine,
    state: TrainState,
    context: distributed.ProcessContext,
    exits: ExitConditions,
    extensions: Extensions,
) -> Metrics:
    """Metrics of this rank. The first rank, which prints the other lines of the log, prints them,
    so that lines keep their order; the last one writes files, as in Megatron."""
    total_iterations = schedules.total_iterations(config, mesh.dp.size, state)
    loggers: list[Logger] = []
    if context.rank == 0:
        write, hosts = output.print_on_rank, [each.name for each in context.locations.values()]
        details = functools.partial(time_details, config.logging, hosts)
        loggers.append(
            ShortConsole(write, total_iterations, details)
            if is_short(config)
            else Console(write, details)
        )
    if context.rank == context.world_size - 1:
        loggers += open_loggers(
            config,
            state,
            save=save,
            world_size=context.world_size,
            dp_size=mesh.dp.size,
            write=lambda text: output.print_on_rank(text, rank_to_print=-1),
            memory=device.device_memory,
            more=extensions.loggers,
        )
    return Metrics(
        ThroughputModel(
            flops_per_sample=run_spec(config).flops,
            seq_length=config.model.seq_length,
            world_size=context.world_size,
            curriculum=config.schedule.curriculum_seqlen is not None,
        ),
        log_interval=config.logging.log_interval,
        total_iterations=total_iterations,
        seconds_left=lambda state, rate: exits.seconds_left(
            schedules.tokens_left(config, mesh.dp.size, state) / rate
        ),
        mean_over_dp=functools.partial(mean_over_group, group=mesh.dp_sp, device=context.device),
        params_norm=engine.params_norm if config.logging.log_params_norm else None,
        step_times=(
            functools.partial(times_of_ranks, engine) if config.logging.times_parts else None
        ),
        loggers=loggers,
    )
