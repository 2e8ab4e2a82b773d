"""Saves and restores complete checkpoints: DeepSpeed's files behind an atomic rename.

    SAVE/latest                             name of the checkpoint that a load selects
    SAVE/latest_checkpointed_iteration.txt  its iteration
    SAVE/global_stepN/                      has this name only once it is complete
        *_states.pt                         DeepSpeed's files
        run.json                            state, configuration, layout, sharding of parameters
        tokenizer/                          a copy of the tokenizer's files
        manifest.json                       size and checksum of every other file, and its own

A save writes and flushes under a temporary name, lists what every rank reports to have written in
the manifest, renames, and updates the pointers last; a crash at any moment leaves the older
checkpoints intact. A disk error of one rank is an error of all ranks: they agree on it, the first
rank cleans up, and the older checkpoints remain. All ranks must see the same folder.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint import local_files, metadata
from megatron_ds.checkpoint.collective_io import CollectiveIO
from megatron_ds.checkpoint.compatibility import (
    changed_settings,
    layout_changes,
    part_conflicts,
    partition_conflicts,
    resume_conflicts,
    tokenizer_conflicts,
)
from megatron_ds.checkpoint.file_assignment import FileAssignment
from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.local.checkpoints import LocalCheckpoints
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.checkpoint.metadata import (
    EIGHT_BIT,
    MANIFEST,
    Checkpoint,
    DataOrder,
    ParallelLayout,
    RunRecord,
    ShardRecord,
    iteration_of,
    list_checkpoints,
    read_manifest,
    read_run,
)
from megatron_ds.checkpoint.run_lock import RunLock
from megatron_ds.checkpoint.save_steps import SaveInProgress, SaveSteps
from megatron_ds.checkpoint.selection import CheckpointListing, list_folder, select_checkpoint
from megatron_ds.checkpoint.store import save as store_save
from megatron_ds.checkpoint.store.claim import RunStores
from megatron_ds.checkpoint.store.fetch import IsNeeded
from megatron_ds.checkpoint.store.save import StoreSaveSteps
from megatron_ds.checkpoint.universal.reader import open_states
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, counted, raise_if_any, with_default_flags
from megatron_ds.data.blend_history import BlendHistory
from megatron_ds.engine.protocol import Engine
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer import TokenizerFingerprint
from megatron_ds.train_state import TrainState

BYTES_PER_PARAMETER = {True: 16, False: 8}
"""Upper bound for a checkpoint: a weight, its fp32 copy and, with the optimizer, two moments."""


@dataclass(frozen=True)
class StoredTokenizer:
    """What a checkpoint keeps of its run's tokenizer."""

    fingerprint: TokenizerFingerprint
    files: Mapping[str, bytes]
    """Contents by path in the copy."""


class CheckpointManager:
    """Saves and restores one run. Methods are collective unless they say otherwise.

    Args:
        config: Configuration of the run.
        mesh: Its process groups.
        log: Prints a line on one rank.
        ranks: All ranks.
        lock: The lock of --save, on the first rank; None if no other run can use the folder.
        folders: The locations of --save and --load, which are local without this argument.
        tokenizer: The run's tokenizer, compared with a checkpoint's. The first rank stores its
            files.
        stores: The stores that --save and --load name.
        local: The checkpoints of --local-checkpoint-dir.
        on_saved: Called for each complete checkpoint with its iteration, the `seconds` that its
            save took, and the seconds that training `waited` for it.

    Attributes:
        newest: The checkpoint that this run has saved or else loaded last.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        log: Callable[[str], None],
        ranks: CollectiveIO,
        lock: RunLock | None = None,
        folders: RunFolders | None = None,
        tokenizer: StoredTokenizer | None = None,
        stores: RunStores | None = None,
        local: LocalCheckpoints | None = None,
        on_saved: Callable[..., object] = lambda iteration, **seconds: None,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._log = log
        self._ranks = ranks
        self._lock = lock
        self._folders = folders or RunFolders.local(config.checkpoint)
        self._tokenizer = tokenizer
        self._stores = stores or RunStores()
        self._local = local
        self._report_saved = on_saved
        self._branch = Lineage.new()
        self._current: SaveInProgress | None = None
        self._last_start = time.monotonic()
        self.newest: Path | None = None

    def save(
        self,
        engine: Engine,
        state: TrainState,
        history: Callable[[], BlendHistory | None] = lambda: None,
        *,
        in_background: bool = False,
        after_skip: bool = False,
    ) -> None:
        """Writes SAVE/global_stepN, then removes those that --keep-last does not keep.

        Args:
            engine: Engine to save.
            state: State after the last step.
            history: Returns the consumption of the training data; called on the first rank only.
            in_background: Return after a copy of the states, which is written in the background.
                `advance` must then be called until it has ended, as the save before must have.
            after_skip: The last step was skipped: no checkpoint is removed.

        Raises:
            SaveError: If the disk of any rank fails, or another run has taken the folder.
        """
        assert self._current is None, "the save before has not ended"
        self._last_start = time.monotonic()
        save = self._collect(engine, state, history, copy=in_background)
        if after_skip:
            save.keep_older()
        current = SaveInProgress(save, self._ranks, self._last_start, in_background=in_background)
        self._current = current
        if not in_background:
            self.advance(wait=True)
            return
        size = save.snapshot.copied_bytes / 1e9
        self._log(
            f"  stalled {current.stalled:.2f} s for the copy of {size:.3f} GB to host memory; "
            "it is written in the background"
        )

    def save_local(
        self,
        engine: Engine,
        state: TrainState,
        history: Callable[[], BlendHistory | None] = lambda: None,
    ) -> None:
        """Writes a checkpoint to the disks of the nodes; an error is a warning.

        Args:
            engine: Engine to save.
            state: State after the last step.
            history: Returns the consumption of the training data; called on the first rank only.
        """
        assert self._local is not None
        place = self._config.checkpoint.local_checkpoint_dir
        save = self._collect(engine, state, history, copy=False, place=place)
        try:
            self._local.save(state.iteration, save.snapshot.write, save.description)
        except OSError as error:
            self._warn(Problem("local-save-failed", iteration=state.iteration, error=error))
            return
        self._log(f"  saved local checkpoint at iteration {state.iteration:7d} on all nodes")

    def advance(self, *, wait: bool) -> None:
        """Continues a save in the background, if there is one.

        Args:
            wait: Wait for its end. Otherwise this waits for no disk.

        Raises:
            SaveError: If it has failed; no save is then in progress.
        """
        current = self._current
        if current is None:
            return
        has_ended, start = True, time.monotonic()
        try:
            has_ended = current.advance(wait=wait)
        finally:
            if has_ended:
                self._current = None
                for warning in current.save.warnings:
                    self._warn(warning)
        if has_ended:
            self._on_saved(current, time.monotonic() - start if wait else 0.0)

    def _on_saved(self, done: SaveInProgress, waited: float) -> None:
        """Logs the end of a save, for which training has waited so many seconds."""
        save = done.save
        self.newest = save.target
        self._report_saved(save.iteration, **done.times(waited))
        self._log(f"  {save.outcome_line}")
        if done.in_background:
            self._log(f"  {done.background_line(waited)}")

    def abandon(self) -> None:
        """Ends the writing of a save in the background, if there is one. Local.

        For a process that is about to end with an error: no thread of it may write when the folder
        is free. The checkpoint remains incomplete.
        """
        if self._current is not None:
            self._current.abandon()

    def minutes_have_passed(self, minutes: float) -> bool:
        """Whether the last save was begun so many minutes ago, by the clock of the first rank."""
        is_late = time.monotonic() - self._last_start >= 60 * minutes
        return self._ranks.is_true_on_all(is_late or self._ranks.rank > 0)

    def _collect(
        self,
        engine: Engine,
        state: TrainState,
        history: Callable[[], BlendHistory | None],
        *,
        copy: bool,
        place: str | None = None,
    ) -> SaveSteps:
        """Collects what a checkpoint of this moment has, and touches no files."""
        options, save = self._config.checkpoint, self._folders.save
        assert save is not None
        self._log(f"saving checkpoint at iteration {state.iteration:7d} to {place or save}")
        snapshot = engine.snapshot(copy=copy)
        specs, partitions = engine.shard_specs(), tuple(engine.partitions())
        experts = engine.sharded_experts()
        # The data-parallel ranks hold the same parameters, except experts; only the first of those
        # with the same experts counts.
        count = engine.parameter_count() if self._mesh.expert_dp.rank == 0 else 0
        has_optimizer = not options.no_save_optim
        estimate = self._ranks.total(count) * BYTES_PER_PARAMETER[has_optimizer]
        run = None
        if self._ranks.rank == 0:
            run = RunRecord(
                state=state,
                config=self._config.to_dict(),
                layout=ParallelLayout.of(self._config, self._mesh.dp.size),
                data_order=DataOrder.of(self._config, self._mesh.dp.size),
                shards={
                    name: ShardRecord(spec.dim, spec.sections, spec.parts)
                    for name, spec in specs.items()
                },
                branch=self._branch,
                partitions=partitions,
                tokenizer=None if self._tokenizer is None else self._tokenizer.fingerprint,
                data=history(),
                experts=experts,
                has_optimizer=has_optimizer,
                custom_parts=self._config.custom_parts,
            )
        kind: Callable[..., SaveSteps] = SaveSteps
        if self._stores.save is not None:
            kind = functools.partial(
                StoreSaveSteps, destination=self._stores.save, world_size=self._mesh.world_size
            )
        return kind(
            folder=save.folder,
            iteration=state.iteration,
            snapshot=snapshot,
            run=run,
            tokenizer_files={} if self._tokenizer is None else self._tokenizer.files,
            estimate=estimate,
            lock=self._lock,
            retention=None
            if options.keep_last is None
            else local_files.Retention(options.keep_last, options.keep_every),
        )

    def select(self) -> Checkpoint | None:
        """Selects the checkpoint of --load to resume from.

        One rank verifies each checksum. The choice of the `LoadPlan` is made again: each rank
        has looked at the folder alone, before another run that wrote to it was excluded.

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
        options, state = self._config.checkpoint, checkpoint.run.state
        if options.is_new_run:
            # At iteration 0, without samples of the old one's data.
            state = TrainState() if options.finetune else state.restarted()
            run = dataclasses.replace(checkpoint.run, state=state, data=None, branch=Lineage.new())
            return dataclasses.replace(checkpoint, run=run)
        return checkpoint

    def _newer_local(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """The local checkpoint with which this run continues after that of --load, if any."""
        options, folders = self._config.checkpoint, self._folders
        if self._local is None or folders.load is None or folders.save is None:
            return None
        place = os.path.realpath(str(folders.save))
        is_resume = os.path.realpath(folders.load.folder) == os.path.realpath(folders.save.folder)

        def is_own(run: RunRecord) -> bool:
            saved = run.config.get("checkpoint", {})
            # Earlier versions saved the URL apart from the staging folder.
            if os.path.realpath(saved.get("save_url") or saved.get("save") or "") != place:
                return False
            return (
                checkpoint is None
                or run.branch.up_to(checkpoint.iteration) == checkpoint.run.branch
            )

        start, restored = 0 if checkpoint is None else checkpoint.iteration, None
        if is_resume and not (options.is_new_run or options.no_load_optim or options.step):
            restored = self._local.restore(start, is_own, self._readers)
        if restored is None:
            self._local.warn_of_unused(start)
        return restored

    def load(self, engine: Engine, checkpoint: Checkpoint) -> TrainState:
        """Restores a selected checkpoint into an engine and returns its state.

        DeepSpeed loads a checkpoint of this run's layout; one of another is resharded.

        Raises:
            UserError: If the checkpoint has other parameters than the engine, or states that cannot
                be resharded.
        """
        folder = checkpoint.path.parent
        iteration = checkpoint.iteration
        saved = {name: shard.parts for name, shard in checkpoint.run.shards.items()}
        own = {name: spec.parts for name, spec in engine.shard_specs().items()}
        raise_if_any(part_conflicts(saved, own, checkpoint.path))
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
            raise_if_any(conflicts if layout.optimizer == EIGHT_BIT else [])
            if self._stores.load is not None and not changes and not is_local:
                self._stores.load.fetch_all(checkpoint.path)
            self._reshard(engine, checkpoint, changes)
        else:
            engine.load(folder, checkpoint.path.name)
        self._ranks.is_true_on_all(True)  # until all have read their files
        if checkpoint.read_lock is not None:
            checkpoint.read_lock.release()
        self.newest = checkpoint.path
        if self._local is not None:
            self._local.discard_after(checkpoint.run.state.iteration)
        self._log(f"  successfully loaded checkpoint from {shown} at iteration {iteration}")
        return checkpoint.run.state

    def _reshard(self, engine: Engine, checkpoint: Checkpoint, changes: Sequence[str]) -> None:
        """Restores a checkpoint of another layout."""
        what = with_default_flags("; ".join(changes))
        if checkpoint.is_universal:
            what = f"from the universal checkpoint {checkpoint.path.name}"
        what = what or "order of the optimizer's flat tensors"
        self._log(f"  resharding its weights and optimizer states: {what}")
        start, source = time.monotonic(), open_states(checkpoint)
        engine.reshard(source)
        read = self._ranks.total(source.bytes_read)
        seconds = time.monotonic() - start
        self._log(
            f"  resharded in {seconds:.1f} s: {read / 1e9:.3f} GB read by "
            f"{counted(self._mesh.world_size, 'process')}, {read / 1e9 / seconds:.2f} GB/s"
        )

    def start_branch(self, checkpoint: Checkpoint | None) -> None:
        """Prepares --save for a run that starts from a checkpoint, or from scratch.

        If the folder has newer checkpoints, those of this run are a branch of their own, and the
        user is warned. In the folder that it was loaded from, the pointers name the checkpoint from
        now on: a --load without --ckpt-step continues this run. Not collective.
        """
        assert self._folders.save is not None
        folder = self._folders.save.folder
        start = 0 if checkpoint is None else checkpoint.iteration
        newer = [path for path in list_checkpoints(folder) if iteration_of(path) > start]
        if checkpoint is not None:
            self._branch = checkpoint.run.branch.fork(start) if newer else checkpoint.run.branch
            if folder.samefile(checkpoint.path.parent) and not checkpoint.is_universal:
                local_files.write_pointers(checkpoint.path)
                if self._stores.save is not None:
                    store_save.write_pointers(self._stores.save.store, checkpoint.path.name)
        find_damage = metadata.check_names
        if self._stores.save is not None:
            find_damage = metadata.find_record_damage  # their files are in the store
        if complete := [path.name for path in newer if find_damage(path) is None]:
            names = ", ".join(complete)
            self._warn(Problem("save-folder-has-newer", folder=folder, names=names, start=start))

    def _warn(self, problem: Problem) -> None:
        self._log(f"WARNING: {problem.render()}")

    def _find_damage(self, path: Path) -> Problem | None:
        """Checks a checkpoint, checksums included; every rank returns the same.

        The first rank checks names and sizes, and one rank the contents of each file.
        """
        if self._stores.load is not None:
            return self._stores.load.find_damage(path, lambda: self._readers(read_run(path).run))
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

    def _find_damaged_files(self, path: Path, own: Mapping[str, FileRecord]) -> dict[str, str]:
        """Checks the files that this rank reads. The first rank has seen all with their sizes."""
        local_files.wait_for_files(path, own)
        return local_files.find_damaged_files(path, own)

    @property
    def _file_assignment(self) -> FileAssignment:
        return FileAssignment(self._mesh.tp.size, self._mesh.dp.size, self._mesh.world_size)

    def _readers(self, run: RunRecord) -> IsNeeded:
        """Which ranks load which files of a checkpoint: all of one that is resharded.

        Also with axes by which file names do not number the ranks.
        """
        options = self._config.checkpoint
        own = ParallelLayout.of(self._config, self._mesh.dp.size)
        is_numbered = own.ds_sequence_parallel_size == own.expert_model_parallel_size == 1
        is_equal = is_numbered and run.layout == own
        if options.finetune or options.no_load_optim or not is_equal:
            return lambda name, rank: True
        return self._file_assignment.is_read_by


def _list_restored(folder: Path) -> CheckpointListing:
    local_files.restore_replaced(folder)
    return list_folder(folder)
