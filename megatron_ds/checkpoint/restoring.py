"""Selects the checkpoint to resume from and restores it, resharded if its layout differs."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_ds.checkpoint import metadata
from megatron_ds.checkpoint.compatibility import (
    changed_settings,
    layout_changes,
    part_conflicts,
    partition_conflicts,
    resume_conflicts,
    tokenizer_conflicts,
)
from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.file_assignment import FileAssignment
from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    Checkpoint,
    ParallelLayout,
    RunRecord,
    list_checkpoints,
    read_manifest,
    read_run,
)
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.checkpoint.selection import CheckpointListing, list_folder, select_checkpoint
from megatron_ds.checkpoint.store.fetch import IsNeeded
from megatron_ds.checkpoint.universal.reader import open_states
from megatron_ds.config.options.optimizer_specs import is_bound_to_layout
from megatron_ds.config.problems import Problem, counted, raise_if_any, with_flags
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.train_state import TrainState


class Restoring:
    """Selects and loads the checkpoint of a run. Methods are collective.

    Attributes:
        loaded: The checkpoint that was loaded last, or None.
    """

    def __init__(self, run: RunCheckpoints) -> None:
        self.loaded: Path | None = None
        self._config = run.config
        self._mesh = run.mesh
        self._ranks = run.ranks
        self._log = run.log
        self._warn = run.warn
        self._folders = run.folders
        self._store = run.stores.load
        self._local = run.local
        self._tokenizer = run.tokenizer

    def select(self) -> Checkpoint | None:
        """Selects the checkpoint of --load to resume from.

        One rank verifies each checksum. The choice of the `LoadPlan` is made again: each rank has
        read the folder alone, before another run that wrote to it was excluded.

        Returns:
            The checkpoint; None if --load has none and does not require one.

        Raises:
            UserError: If the checkpoint is damaged, missing, or contradicts this run's settings.
        """
        assert self._folders.load is not None
        folder = self._folders.load.folder
        checkpoint = select_checkpoint(
            self._ranks.run_on_rank0(lambda: _list_restored(folder)),
            self._config.checkpoint,
            self._find_damage,
            self._warn,
            lambda listing: self._ranks.run_on_rank0(listing.fallbacks),
            lambda path: metadata.lock_for_reading(path) if self._ranks.rank == 0 else None,
            lambda path: self._ranks.run_on_rank0(lambda: read_run(path)),
        )
        checkpoint = self._newer_local(checkpoint) or checkpoint
        if checkpoint is None:
            if self._folders.load == self._folders.save and not list_checkpoints(folder):
                self._log(f" no checkpoint in {folder} yet: training starts from random weights")
            else:
                self._warn(Problem("no-checkpoint-to-load", folder=self._folders.load))
            return None
        conflicts = resume_conflicts(checkpoint, self._config, self._mesh.dp.size)
        if self._tokenizer is not None:
            conflicts += tokenizer_conflicts(checkpoint, self._tokenizer.fingerprint)
        raise_if_any(conflicts)
        for warning in changed_settings(checkpoint, self._config, self._mesh.dp.size):
            self._warn(warning)
        options = self._config.checkpoint
        state = checkpoint.run.state
        if options.is_new_run:
            # At iteration 0, without samples of the old one's data.
            state = TrainState() if options.finetune else state.restarted()
            run = dataclasses.replace(checkpoint.run, state=state, data=None, branch=Lineage.new())
            return dataclasses.replace(checkpoint, run=run)
        return checkpoint

    def _newer_local(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """The local checkpoint to continue from, if one is newer than --load's."""
        options = self._config.checkpoint
        folders = self._folders
        if self._local is None or folders.load is None or folders.save is None:
            return None
        folder = os.path.realpath(str(folders.save))
        is_resume = os.path.realpath(folders.load.folder) == os.path.realpath(folders.save.folder)

        def is_own(run: RunRecord) -> bool:
            saved = run.config.get("checkpoint", {})
            # Earlier versions saved the URL apart from the staging folder.
            if os.path.realpath(saved.get("save_url") or saved.get("save") or "") != folder:
                return False
            return (
                checkpoint is None
                or run.branch.up_to(checkpoint.iteration) == checkpoint.run.branch
            )

        start = 0 if checkpoint is None else checkpoint.iteration
        restored = None
        if is_resume and not (options.is_new_run or options.no_load_optim or options.step):
            restored = self._local.restore(start, is_own, self._readers)
        if restored is None:
            self._local.warn_of_unused(start)
        return restored

    def load(self, engine: ZeroEngine, checkpoint: Checkpoint) -> TrainState:
        """Restores a selected checkpoint into an engine and returns its state.

        DeepSpeed loads a checkpoint of this run's layout; one of another is resharded.

        Raises:
            UserError: If the checkpoint has other parameters than the engine, or states that cannot
                be resharded.
        """
        folder = checkpoint.path.parent
        iteration = checkpoint.iteration
        saved = {name: shard.parts for name, shard in checkpoint.run.shards.items()}
        current = {name: spec.parts for name, spec in engine.shard_specs().items()}
        if self._config.has_whole_experts:  # whose sections are no parts
            current = {name: parts for name, parts in current.items() if ".experts." not in name}
        raise_if_any(part_conflicts(saved, current, checkpoint.path))
        load = self._folders.load
        is_local = load is None or folder != load.folder
        shown = folder if is_local else load
        self._log(f" loading checkpoint from {shown} at iteration {iteration}")
        layout = ParallelLayout.of(self._config, self._mesh.dp.size)
        conflicts = partition_conflicts(checkpoint, engine.partitions())
        changes = layout_changes(checkpoint.run.layout, layout)
        options = self._config.checkpoint
        if options.finetune or options.no_load_optim:
            self._log("  loading its weights, but not the states of its optimizer")
            engine.reshard(open_states(checkpoint, has_optimizer=False))
        elif checkpoint.is_universal:
            self._reshard(engine, checkpoint, changes)
        elif self._ranks.run_merged(lambda: bool(changes or conflicts), any):
            raise_if_any(conflicts if is_bound_to_layout(layout.optimizer) else [])
            if self._store is not None and not changes and not is_local:
                self._store.fetch_all(checkpoint.path)
            self._reshard(engine, checkpoint, changes)
        else:
            engine.load(folder, checkpoint.path.name)
        self._ranks.is_true_on_all(True)  # until all have read their files
        if checkpoint.read_lock is not None:
            checkpoint.read_lock.release()
        self.loaded = checkpoint.path
        if self._local is not None:
            self._local.discard_after(checkpoint.run.state.iteration)
        self._log(f"  successfully loaded checkpoint from {shown} at iteration {iteration}")
        return checkpoint.run.state

    def _reshard(self, engine: ZeroEngine, checkpoint: Checkpoint, changes: Sequence[str]) -> None:
        """Restores a checkpoint of another layout."""
        what = with_flags("; ".join(changes))
        if checkpoint.is_universal:
            what = f"from the universal checkpoint {checkpoint.path.name}"
        what = what or "order of the optimizer's flat tensors"
        self._log(f"  resharding its weights and optimizer states: {what}")
        start = time.monotonic()
        source = open_states(checkpoint)
        engine.reshard(source)
        read = self._ranks.total(source.bytes_read)
        seconds = time.monotonic() - start
        self._log(
            f"  resharded in {seconds:.1f} s: {read / 1e9:.3f} GB read by "
            f"{counted(self._mesh.world_size, 'process')}, {read / 1e9 / seconds:.2f} GB/s"
        )

    def _find_damage(self, path: Path) -> Problem | None:
        """Checks a checkpoint, checksums included; every rank returns the same.

        The first rank checks names and sizes, and one rank the contents of each file.
        """
        if self._store is not None:
            return self._store.find_damage(path, lambda: self._readers(read_run(path).run))
        damage = self._ranks.run_on_rank0(lambda: metadata.check_names(path))
        if damage is not None:
            return damage
        if self._ranks.run_on_rank0(lambda: not (path / MANIFEST).is_file()):
            return None  # a universal checkpoint of DeepSpeed's converter
        try:
            assignment = self._file_assignment
            mine = self._ranks.scatter_from_rank0(lambda: assignment.by_rank(read_manifest(path)))
            return self._ranks.run_merged(
                lambda: self._find_damaged_files(path, mine),
                lambda parts: local_files.files_damaged(*parts),
            )
        except (OSError, ValueError) as error:
            return metadata.unreadable_checkpoint(error)

    def _find_damaged_files(self, path: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
        """Checks the files that this rank reads. The first rank has seen all with their sizes."""
        local_files.wait_for_files(path, files)
        return local_files.find_damaged_files(path, files)

    @property
    def _file_assignment(self) -> FileAssignment:
        return FileAssignment(self._mesh.tp.size, self._mesh.dp.size, self._mesh.world_size)

    def _readers(self, run: RunRecord) -> IsNeeded:
        """The ranks that load each file of a checkpoint: all ranks, if it is resharded.

        Also with axes by which file names do not number the ranks.
        """
        options = self._config.checkpoint
        layout = ParallelLayout.of(self._config, self._mesh.dp.size)
        is_numbered = layout.ds_sequence_parallel_size == layout.expert_model_parallel_size == 1
        is_equal = is_numbered and run.layout == layout
        if options.finetune or options.no_load_optim or not is_equal:
            return _is_read_by_all
        return self._file_assignment.is_read_by


def _list_restored(folder: Path) -> CheckpointListing:
    local_files.restore_replaced(folder)
    return list_folder(folder)


def _is_read_by_all(name: str, rank: int) -> bool:
    return True
