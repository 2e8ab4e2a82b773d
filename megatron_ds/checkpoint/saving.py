"""Saves complete checkpoints: DeepSpeed's files behind an atomic rename.

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

import functools
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ds.checkpoint import metadata
from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.folders.run_lock import RunLock
from megatron_ds.checkpoint.lineage import Lineage, starts_fork
from megatron_ds.checkpoint.metadata import (
    Checkpoint,
    DataOrder,
    ParallelLayout,
    RunRecord,
    ShardRecord,
    iteration_of,
    list_checkpoints,
)
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.checkpoint.save_steps import SaveInProgress, SaveSteps
from megatron_ds.checkpoint.store import save as store_save
from megatron_ds.checkpoint.store.save import StoreSaveSteps
from megatron_ds.config.problems import Problem
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.train_state import TrainState

BYTES_PER_PARAMETER = {True: 16, False: 8}
"""Upper bound for a checkpoint: a weight, its fp32 copy and, with the optimizer, two moments."""


class Saving:
    """Saves the checkpoints of a run. Methods are collective unless noted otherwise.

    Attributes:
        newest: The checkpoint that was saved last, or None.
    """

    def __init__(
        self,
        run: RunCheckpoints,
        lock: RunLock | None = None,
        on_saved: Callable[..., object] | None = None,
    ) -> None:
        """Prepares the saves of a run.

        Args:
            run: The run.
            lock: The lock of --save, on the first rank; None if no other run can use the folder.
            on_saved: Called for each complete checkpoint with its iteration, the `seconds` that its
                save took, and the seconds that training `waited` for it.
        """
        self.newest: Path | None = None
        self._config = run.config
        self._mesh = run.mesh
        self._ranks = run.ranks
        self._log = run.log
        self._warn = run.warn
        self._folder = run.folders.save
        self._store = run.stores.save
        self._local = run.local
        self._tokenizer = run.tokenizer
        self._lock = lock
        self._on_saved = on_saved
        self._branch = Lineage.new()
        self._current: SaveInProgress | None = None
        self._last_start = time.monotonic()

    @functools.cached_property
    def _key(self) -> str:
        """See `SaveSteps`."""
        return self._ranks.run_on_rank0(lambda: secrets.token_hex(4))

    @property
    def _retention(self) -> local_files.Retention | None:
        options = self._config.checkpoint
        if options.keep_last is None:
            return None
        return local_files.Retention(options.keep_last, options.keep_every)

    def save(
        self,
        engine: ZeroEngine,
        state: TrainState,
        history: Callable[[], BlendHistory | None] | None = None,
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
        engine: ZeroEngine,
        state: TrainState,
        history: Callable[[], BlendHistory | None] | None = None,
    ) -> None:
        """Writes a checkpoint to the disks of the nodes; an error is a warning.

        Args:
            engine: Engine to save.
            state: State after the last step.
            history: Returns the consumption of the training data; called on the first rank only.
        """
        assert self._local is not None
        folder = self._config.checkpoint.local_checkpoint_dir
        save = self._collect(engine, state, history, copy=False, folder=folder)
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
        has_ended = True
        start = time.monotonic()
        try:
            has_ended = current.advance(wait=wait)
        finally:
            if has_ended:
                self._current = None
                for warning in current.save.warnings:
                    self._warn(warning)
        if has_ended:
            self._finish(current, time.monotonic() - start if wait else 0.0)

    def _finish(self, done: SaveInProgress, waited: float) -> None:
        """Logs a completed save and the seconds that training waited for it."""
        save = done.save
        self.newest = save.target
        if self._on_saved is not None:
            self._on_saved(save.iteration, **done.times(waited))
        folder = save.shown_folder
        self._log(f"  {save.outcome} checkpoint at iteration {save.iteration:7d} to {folder}")
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
        """Whether at least `minutes` minutes have passed since the last save began, by the clock of
        the first rank."""
        is_late = time.monotonic() - self._last_start >= 60 * minutes
        return self._ranks.is_true_on_all(is_late or self._ranks.rank > 0)

    def _collect(
        self,
        engine: ZeroEngine,
        state: TrainState,
        history: Callable[[], BlendHistory | None] | None,
        *,
        copy: bool,
        folder: str | None = None,
    ) -> SaveSteps:
        """Collects what a checkpoint of this moment has, and touches no files."""
        options = self._config.checkpoint
        save = self._folder
        assert save is not None
        self._log(f"saving checkpoint at iteration {state.iteration:7d} to {folder or save}")
        snapshot = engine.snapshot(copy=copy)
        specs = engine.shard_specs()
        partitions = tuple(engine.partitions())
        experts = engine.sharded_experts()
        # The data-parallel ranks hold the same parameters, except experts; only the first rank with
        # the same experts counts.
        count = engine.parameter_count() if self._mesh.expert_dp.rank == 0 else 0
        has_optimizer = not options.no_save_optim
        estimate = self._ranks.total(count) * BYTES_PER_PARAMETER[has_optimizer]
        run = None
        if self._ranks.rank == 0:
            # Tools read the values of the stage; a resume also needs the names of the stages.
            config = self._config.in_phase(state.stage)
            run = RunRecord(
                state=state,
                config=config.with_values({"stages": self._config.schedule.stages}).to_dict(),
                layout=ParallelLayout.of(config, self._mesh.dp.size),
                data_order=DataOrder.of(config, self._mesh.dp.size),
                shards={
                    name: ShardRecord(spec.dim, spec.sections, spec.parts)
                    for name, spec in specs.items()
                },
                branch=self._branch,
                partitions=partitions,
                tokenizer=None if self._tokenizer is None else self._tokenizer.fingerprint,
                data=None if history is None else history(),
                experts=experts,
                has_optimizer=has_optimizer,
                custom_parts=self._config.custom_parts,
                published=self._config.published,
            )
        make_steps = self._make_steps()
        return make_steps(
            folder=save.folder,
            iteration=state.iteration,
            snapshot=snapshot,
            run=run,
            tokenizer_files={} if self._tokenizer is None else self._tokenizer.files,
            estimate=estimate,
            lock=self._lock,
            key=self._key,
            retention=self._retention,
        )

    def _make_steps(self) -> Callable[..., SaveSteps]:
        """The steps of a save to a folder, or to the store of --save."""
        if self._store is None:
            return SaveSteps
        return functools.partial(
            StoreSaveSteps, destination=self._store, world_size=self._mesh.world_size
        )

    def start_branch(self, checkpoint: Checkpoint | None) -> None:
        """Prepares --save for a run that starts from a checkpoint, or from scratch.

        If the folder has newer checkpoints, this run's are a branch of their own, and the user is
        warned; those of a fork of another run are one as well. In the folder that it was loaded
        from, the pointers name the checkpoint from now on: a --load without --ckpt-step continues
        this run. Not collective.
        """
        assert self._folder is not None
        folder = self._folder.folder
        start = 0 if checkpoint is None else checkpoint.iteration
        newer = [path for path in list_checkpoints(folder) if iteration_of(path) > start]
        if checkpoint is not None:
            is_fork = bool(newer) or starts_fork(folder, start)
            self._branch = checkpoint.run.branch.fork(start) if is_fork else checkpoint.run.branch
            if folder.samefile(checkpoint.path.parent) and not checkpoint.is_universal:
                local_files.write_pointers(checkpoint.path)
                if self._store is not None:
                    store_save.write_pointers(self._store.store, checkpoint.path.name)
        find_damage = metadata.check_names
        if self._store is not None:
            find_damage = metadata.find_record_damage  # their files are in the store
        if complete := [path.name for path in newer if find_damage(path) is None]:
            names = ", ".join(complete)
            self._warn(Problem("save-folder-has-newer", folder=folder, names=names, start=start))
