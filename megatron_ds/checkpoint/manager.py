"""Checkpoints that are complete or not there: DeepSpeed's files below an atomic rename.

    SAVE/latest                             name of the newest folder
    SAVE/latest_checkpointed_iteration.txt  its iteration
    SAVE/global_stepN/                      appears under this name only when it is whole
        *_states.pt                         DeepSpeed's
        run.json                            state, configuration, layout, how parameters are cut
        manifest.json                       size and SHA-256 of every other file, and its own

A save writes below a temporary name, flushes, lists what it wrote in the manifest, renames, and
moves the pointers last; a crash at any moment leaves the older checkpoints as they were. An error
of one rank's disk is all ranks' error: they agree, the first one cleans up, and the older
checkpoints stand. A load takes the newest folder whose manifest holds. All ranks see the same
folder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron_ds.checkpoint import storage
from megatron_ds.checkpoint.metadata import (
    FORMAT_VERSION,
    MANIFEST,
    RUN,
    CheckpointMetadata,
    checksum_manifest,
    data_order_settings,
    find_damage,
    list_checkpoints,
    parallel_layout,
    read_run,
    resume_conflicts,
    stale_pointers,
)
from megatron_ds.config import Config
from megatron_ds.engine.protocol import Engine
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState

T = TypeVar("T")
BYTES_PER_PARAMETER = 16
"""At most, of a checkpoint: a weight, its fp32 copy, two moments."""


class SaveError(RunAborted):
    """A checkpoint could not be saved; raised on every rank, with the older ones as they were."""

    def __init__(self, words: str) -> None:
        super().__init__(words, ExitCode.SAVE_FAILED)


class CheckpointManager:
    """Saves and restores one run. Every method is collective but where it says otherwise.

    say: prints a line on one rank.
    """

    def __init__(self, config: Config, mesh: Mesh, say: Callable[[str], None]) -> None:
        self._config = config
        self._mesh = mesh
        self._say = say

    def save(
        self, engine: Engine, state: TrainState, data: Callable[[], dict[str, Any]] = dict
    ) -> None:
        """Writes SAVE/global_stepN, then removes those that --keep-last does not keep.

        data: gives the record of the training data (`data.history`), called on the first rank.
        Raises SaveError where a rank's disk has an error.
        """
        assert self._config.checkpoint.save is not None
        folder = Path(self._config.checkpoint.save)
        self._say(f"saving checkpoint at iteration {state.iteration:7d} to {folder}")
        target = folder / f"global_step{state.iteration}"
        temporary = folder / f"{storage.INCOMPLETE}{target.name}"
        try:
            self._write(engine, state, data, temporary)
            self._rank0_result(lambda: storage.publish(temporary, target))
        except OSError as error:
            self._rank0_result(lambda: _clean_up(folder))
            raise SaveError(
                f"could not save the checkpoint of iteration {state.iteration} to {folder}: "
                f"{error}. What was written of it is removed; older checkpoints are as they were"
            ) from error
        self._update_pointers(target, state.iteration)
        self._say(f"  successfully saved checkpoint at iteration {state.iteration:7d} to {folder}")

    def select(self) -> CheckpointMetadata | None:
        """The newest complete checkpoint of LOAD, or that of --ckpt-step; None if LOAD holds none
        at all.

        Raises ValueError if it belongs to another model or layout, if it is damaged and
        --on-damaged-checkpoint does not allow an older one, or if all are damaged.
        """
        assert self._config.checkpoint.load is not None
        folder = Path(self._config.checkpoint.load)
        found = self._select_newest(folder)
        if found is None:
            self._say(f"WARNING: could not find a complete checkpoint in {folder}")
            self._say("    will not load any checkpoints and will start from random")
            return None
        problems = resume_conflicts(found, self._config, self._mesh.dp.size)
        if problems:
            lines = "".join(f"\n  - {problem}" for problem in problems)
            raise ValueError(f"the checkpoint {found.path} does not fit this run:{lines}")
        return found

    def load(self, engine: Engine, found: CheckpointMetadata) -> TrainState:
        """Restores a checkpoint that was found."""
        folder = found.path.parent
        self._say(f" loading checkpoint from {folder} at iteration {found.iteration}")
        engine.load(folder, found.path.name)
        self._say(f"  successfully loaded checkpoint from {folder} at iteration {found.iteration}")
        return found.state

    def warn_of_newer(self, state: TrainState) -> None:
        """Tells if SAVE holds a complete checkpoint beyond `state`: a later load would take it.

        Not collective.
        """
        assert self._config.checkpoint.save is not None
        folder = Path(self._config.checkpoint.save)
        complete = (
            read_run(path) for path in list_checkpoints(folder) if find_damage(path) is None
        )
        found = next(complete, None)
        if found is not None and found.iteration > state.iteration:
            self._say(
                f"WARNING: {folder} holds a checkpoint of iteration {found.iteration}, and this "
                f"run starts from iteration {state.iteration}: a later --load would take the "
                "older run's. Move it away, or choose another --save"
            )

    def _write(
        self,
        engine: Engine,
        state: TrainState,
        data: Callable[[], dict[str, Any]],
        temporary: Path,
    ) -> None:
        """All of a checkpoint, on the disk, under its temporary name."""
        warning = self._rank0_result(lambda: _make_temp_dir(temporary, self._size(engine)))
        if warning is not None:
            self._say(warning)
        self._all_ranks(lambda: engine.save(temporary.parent, temporary.name))
        facts = self._run_facts(engine, state)
        self._rank0_result(lambda: storage.write_json(temporary / RUN, {**facts, "data": data()}))
        entries = self._map_files(temporary, storage.fsync_and_hash)
        self._rank0_result(
            lambda: storage.write_text(temporary / MANIFEST, checksum_manifest(entries))
        )

    def _update_pointers(self, target: Path, iteration: int) -> None:
        """What a complete checkpoint brings with it; its errors cost the checkpoint nothing."""
        keep = self._config.checkpoint.keep_last
        try:
            self._rank0_result(lambda: storage.write_latest(target, iteration))
            if keep is not None:
                self._rank0_result(lambda: storage.remove_older(target.parent, target, keep))
        except OSError as error:
            self._say(
                f"WARNING: {target} is complete, but the pointers to it could not be written, or "
                f"an older checkpoint not be removed: {error}"
            )

    def _select_newest(self, folder: Path) -> CheckpointMetadata | None:
        """The checkpoint to load, after telling which newer ones are not complete."""
        paths = self._rank0_result(lambda: _candidates(folder))
        step = self._config.checkpoint.ckpt_step
        if step is not None:
            return self._select_step(folder, paths, step)
        newest = paths[0] if paths else None
        wrong = self._rank0_result(lambda: stale_pointers(folder, newest))
        if newest is None:
            self._refuse_missing(folder, wrong)
            return None
        if wrong:
            self._say(
                f"WARNING: {' and '.join(wrong)}, but the newest checkpoint there is {newest.name}:"
                " the folders decide (--ckpt-step takes an older one)"
            )
        refuse = self._config.checkpoint.on_damaged_checkpoint == "error"
        problems = []
        for path in paths:
            problem = self._problem(path)
            if problem is None:
                return read_run(path)
            if refuse:
                raise ValueError(
                    f"the checkpoint {path} is damaged, and --on-damaged-checkpoint is error: "
                    f"{problem}. To take the one before it: --on-damaged-checkpoint fallback"
                )
            self._say(f"WARNING: skipping the checkpoint {path}: {problem}")
            problems.append(f"\n  - {path}: {problem}")
        raise ValueError(
            f"--load {folder}: every checkpoint in it is damaged:{''.join(problems)}\n"
            "Repair or restore one, or move them away to start a new run"
        )

    def _select_step(self, folder: Path, paths: list[Path], step: int) -> CheckpointMetadata:
        """The checkpoint of --ckpt-step and no other."""
        path = folder / f"global_step{step}"
        if path not in paths:
            names = ", ".join(path.name for path in paths) or "none"
            raise ValueError(f"--ckpt-step {step}: {path} is not there; checkpoints are: {names}")
        problem = self._problem(path)
        if problem is not None:
            raise ValueError(f"--ckpt-step {step}: the checkpoint {path} is damaged: {problem}")
        return read_run(path)

    def _refuse_missing(self, folder: Path, pointers: list[str]) -> None:
        """A new run where a checkpoint was expected would throw away what was trained."""
        if pointers:
            raise ValueError(
                f"--load {folder}: {' and '.join(pointers)}, but there is no global_stepN folder. "
                "Restore it, or remove the pointer to start a new run"
            )
        if self._config.checkpoint.exit_on_missing_checkpoint:
            raise ValueError(
                f"--load {folder}: there is no checkpoint in it, and --exit-on-missing-checkpoint "
                "is given"
            )

    def _problem(self, path: Path) -> str | None:
        """What is wrong with a checkpoint on any rank; None if nothing is."""
        seen = self._all_ranks(lambda: find_damage(path))
        problem = next((text for text in seen if text is not None), None)
        if problem is not None:
            return problem
        try:
            return "; ".join(self._map_files(path, storage.find_damaged_files).values()) or None
        except (OSError, ValueError) as error:
            return f"it cannot be read ({error})"

    def _rank0_result(self, work: Callable[[], T]) -> T:
        """Runs `work` on the first rank; every rank gets its result, or raises its error."""
        answer: list[Any] = [None, None]
        if self._mesh.rank == 0:
            answer = _attempt(work)
        dist.broadcast_object_list(answer, src=0)
        result, error = answer
        if error is not None:
            raise error.with_traceback(None)
        done: T = result
        return done

    def _all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Runs `work` on every rank; every rank gets all results, or raises the first error."""
        answers: list[Any] = [None] * self._mesh.world_size
        dist.all_gather_object(answers, _attempt(work))
        for rank, (_, error) in enumerate(answers):
            if error is not None:
                who = f"rank {rank}: " if len(answers) > 1 else ""
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(f"{who}{error}") from error
        return [result for result, _ in answers]

    def _map_files(
        self, path: Path, work: Callable[[Path, list[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Runs `work` over the files below `path`, each file on one rank; gives all results."""
        names = self._rank0_result(
            lambda: [name for name in storage.files_below(path) if name != MANIFEST]
        )
        mine = names[self._mesh.rank :: self._mesh.world_size]
        parts = self._all_ranks(lambda: work(path, mine))
        return {name: value for part in parts for name, value in part.items()}

    def _size(self, engine: Engine) -> int:
        """Bytes of a checkpoint, estimated from above."""
        return engine.parameter_count() * self._mesh.tp.size * BYTES_PER_PARAMETER

    def _run_facts(self, engine: Engine, state: TrainState) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "state": state.to_dict(),
            "config": self._config.to_dict(),
            "layout": parallel_layout(self._config, self._mesh.dp.size),
            "order": data_order_settings(self._config, self._mesh.dp.size),
            "shards": {
                name: {"dim": spec.dim, "sections": list(spec.sections)}
                for name, spec in engine.shard_specs().items()
            },
        }


def _attempt(work: Callable[[], Any]) -> list[Any]:
    """The result and None, or None and the error of the disk or of what was read."""
    try:
        return [work(), None]
    except (OSError, ValueError) as error:
        return [None, error]


def _make_temp_dir(temporary: Path, estimate: int) -> str | None:
    """Makes room and the folder to write to; a warning if the disk may become full.

    estimate: bytes of a checkpoint, where there is none to compare with.
    """
    folder = temporary.parent
    storage.remove_temporary(folder)
    temporary.mkdir(parents=True)
    needed = storage.size_of_newest(folder) or estimate
    free = storage.free_bytes(folder)
    if free >= needed:
        return None
    return (
        f"WARNING: {folder} has {free / 1e9:.2f} GB free, and a checkpoint takes about "
        f"{needed / 1e9:.2f} GB: the save may fail. Make room; --keep-last N keeps fewer"
    )


def _clean_up(folder: Path) -> None:
    # What cannot be removed now is removed by the next save.
    with suppress(OSError):
        storage.remove_temporary(folder)


def _candidates(folder: Path) -> list[Path]:
    storage.restore_replaced(folder)
    return list_checkpoints(folder)
