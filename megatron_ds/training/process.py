"""One process of a run: joins its peer ranks, claims the folders, builds the parts and trains.

Owns what must be undone at the end. Collective: every rank calls `train`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.folders.folder_checks import claimed_folders, folder_ownership
from megatron_ds.checkpoint.folders.run_lock import RunLock
from megatron_ds.checkpoint.local.checkpoints import LocalCheckpoints
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints, StoredTokenizer
from megatron_ds.checkpoint.store.claim import RunStores, claimed_stores
from megatron_ds.config import Config
from megatron_ds.engine.deepspeed.patches import require_precision
from megatron_ds.launch import output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process.lifecycle import ProcessLifecycle
from megatron_ds.launch.process.rank_end import POLL_S
from megatron_ds.launch.process.stop_request import StopReason
from megatron_ds.launch.ranks import distributed
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.launch.watch.hang_watch import HangWatch
from megatron_ds.launch.watch.host_watch import HostWatch
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer.stored_files import read_files
from megatron_ds.training.build import RunParts, build_trainer
from megatron_ds.training.extensions import Extensions
from megatron_ds.training.loggers.events import EventLog
from megatron_ds.training.loggers.jsonl_logger import always
from megatron_ds.training.loggers.selection import owned_tensorboard_folder
from megatron_ds.training.run_record import RunRecord
from megatron_ds.training.start.preflight import RunInputs
from megatron_ds.training.start.startup_report import StartReport
from megatron_ds.training.trainer import Trainer


def train(
    config: Config,
    inputs: RunInputs,
    extensions: Extensions,
    life: ProcessLifecycle,
    startup: StartupTimer,
) -> RunRecord:
    """Runs one process of a training run.

    Errors propagate as exceptions; only a clean finish destroys the process group.

    Args:
        config: Configuration without problems.
        inputs: Tokenizer and data files that the checks of this process have opened.
        extensions: Parts of the run that its program brings.
        life: Handles signals and the loss of other processes.
        startup: Measures the phases of the start.
    """
    settings = config
    config = config.with_vocab(inputs.tokenizer.vocab_size)
    require_precision(config.precision)
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    context = _init_distributed(config, inputs, life, timeout)
    startup.mark("process group")
    ranks = CollectiveIO()
    folders = inputs.plan.folders
    events = EventLog(output.print_on_rank)
    with output.recording(events.warning), _claimed(config, folders, ranks) as (lock, stores):
        owned = stores.lock or lock
        _watch_lock(life, owned)
        ownership = stores.ownership or folder_ownership(lock, folders, ranks)
        events.may_write = always if ownership is None else ownership.may_write
        tokenizer = _stored_tokenizer(config, inputs, context.rank)
        local = LocalCheckpoints.open(config.checkpoint, ranks, output.warn_on_rank)
        mesh = Mesh.build(**config.mesh_sizes, timeout=timeout)
        report = _start_report(config, context, mesh, folders.local_save)
        checkpoints = _checkpoint_manager(
            config, mesh, ranks, owned, folders, tokenizer, stores, local, events
        )
        parts = RunParts(
            config,
            inputs,
            extensions,
            context,
            mesh,
            life,
            startup,
            events,
            report,
            checkpoints,
            events.may_write,
        )
        trainer = build_trainer(parts)
        report.write_settings(settings)
        life.on_training_started(saves=folders.save is not None)
        code = _run(trainer, events)
        dist.barrier()  # the folder is free once no rank writes to it
        life.on_finished()
    distributed.destroy_process_group()
    return parts.recorder.record(code, checkpoints.newest)


def _init_distributed(
    config: Config, inputs: RunInputs, life: ProcessLifecycle, timeout: timedelta
) -> distributed.ProcessContext:
    """Meets the ranks of the run, and watches them from now on."""
    meeting = functools.partial(life.rendezvous, timeout)
    with life.limited_start(timeout):
        context = distributed.init_distributed(config.runtime, meeting, life.roll_call)
        _watch_ranks(life, config, context, inputs.plan.folders.local_save)
    return context


@contextmanager
def _claimed(
    config: Config, folders: RunFolders, ranks: CollectiveIO
) -> Iterator[tuple[RunLock | None, RunStores]]:
    """Owns the folders and stores of a run. Collective."""
    with (
        claimed_folders(folders, ranks, output.print_on_rank) as lock,
        claimed_stores(folders, ranks, output.print_on_rank) as stores,
        owned_tensorboard_folder(config.logging, ranks),
    ):
        yield lock, stores


def _stored_tokenizer(config: Config, inputs: RunInputs, rank: int) -> StoredTokenizer:
    """The tokenizer in checkpoints, with its files on the rank that saves them."""
    is_saved = rank == 0 and inputs.plan.folders.save is not None
    files = read_files(config.tokenizer) if is_saved else {}
    return StoredTokenizer(inputs.tokenizer.fingerprint, files)


def _start_report(
    config: Config, context: distributed.ProcessContext, mesh: Mesh, local_save: Path | None
) -> StartReport:
    """Prints the settings, and warns of hosts that differ."""
    is_written = context.rank == 0 and config.evaluation.eval_only is None
    report = StartReport(config, context, mesh, local_save if is_written else None)
    report.print_arguments()
    report.warn_of_hosts()
    return report


def _checkpoint_manager(
    config: Config,
    mesh: Mesh,
    ranks: CollectiveIO,
    lock: RunLock | None,
    folders: RunFolders,
    tokenizer: StoredTokenizer,
    stores: RunStores,
    local: LocalCheckpoints | None,
    events: EventLog,
) -> CheckpointManager:
    run = RunCheckpoints(
        config, mesh, output.print_on_rank, ranks, folders, tokenizer, stores, local
    )
    return CheckpointManager(run, lock, functools.partial(events.record, "checkpoint"))


def _watch_lock(life: ProcessLifecycle, lock: RunLock | None) -> None:
    """Ends the run once another one has taken its --save folder."""
    if lock is not None:
        lock.on_lost = functools.partial(life.stop_request.request, StopReason.FOLDER_LOST)


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
        trainer.checkpoints.saving.abandon()  # before the folder is free
        events.record("end", iteration=trainer.state.iteration, error=output.error_message(error))
        raise
    events.record("end", iteration=trainer.state.iteration, status=int(code))
    return code
