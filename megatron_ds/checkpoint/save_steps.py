"""The steps of a save after the snapshot: work with files, of one rank or of all.

    prepare   rank 0   checks the lock, removes leftovers, creates the temporary folder
    write     all      their files, each flushed to the disk
    complete  rank 0   run.json, tokenizer, manifest; the rename; the pointers; retention

`SaveSteps` owns what each step does, and `SaveInProgress` when: while training waits, or in a
thread of each rank while it continues. These threads do not communicate: between two steps, the
main threads agree that all ranks have finished, and exchange the results.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.collective_io import CollectiveIO, Outcome, RankWork
from megatron_ds.checkpoint.files.local_files import Retention
from megatron_ds.checkpoint.folders.run_lock import RunLock
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    POINTER_PENDING,
    RUN,
    TOKENIZER,
    RunRecord,
    manifest_text,
)
from megatron_ds.config.problems import Problem
from megatron_ds.engine.deepspeed.checkpoint_io import DeepSpeedSnapshot
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.fileio.visibility import retry
from megatron_ds.launch.exit_codes import ExitCode, RunAborted

ABANDON_S = 10.0
"""Longest wait for the disk of a process that is about to end with an error."""

Steps = Generator[RankWork, Any, None]
"""Yields work; receives what `CollectiveIO.share` returns for it, or raises."""


class SaveError(RunAborted):
    """A checkpoint could not be saved; raised on every rank. Older checkpoints are intact."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.render(), ExitCode.SAVE_FAILED)
        self.problem = problem


class FolderLostError(OSError):
    """Another run has taken the --save folder."""


@dataclass
class SaveSteps:
    """One save.

    Attributes:
        folder: Folder of the checkpoints.
        iteration: Iteration of the checkpoint.
        snapshot: Tensors and states that this rank writes.
        run: Contents of run.json, on the first rank.
        tokenizer_files: Contents by path in the tokenizer's folder, on the first rank.
        estimate: Bytes of a checkpoint, used without an earlier one to compare with.
        lock: The lock of the folder, on the first rank; None if no other run can use it.
        key: Distinguishes this run's unfinished folders from the folders of a run that takes over
            --save; the same on all ranks.
        retention: Rule for the older checkpoints to keep; None keeps all.
        warnings: Problems that did not fail the save.
        outcome: Verb of the log line: "successfully saved", or "wrote" for a checkpoint after a
            skipped step.
    """

    folder: Path
    iteration: int
    snapshot: DeepSpeedSnapshot
    run: RunRecord | None
    tokenizer_files: Mapping[str, bytes]
    estimate: int
    lock: RunLock | None
    key: str
    retention: Retention | None
    warnings: list[Problem] = field(default_factory=list)
    outcome: str = "successfully saved"

    def keep_older(self) -> None:
        """The last step was skipped: no older checkpoint is removed."""
        self.retention = None
        self.outcome = "wrote"
        self.warnings.append(Problem("saved-after-skipped-step", iteration=self.iteration))

    @property
    def target(self) -> Path:
        """The folder of the complete checkpoint."""
        return self.folder / f"global_step{self.iteration}"

    @property
    def shown_folder(self) -> str:
        """Location of the checkpoint, for messages."""
        return str(self.folder)

    @property
    def temporary(self) -> Path:
        """The folder until it is complete. Ranks that were suspended may still write to theirs."""
        return self.folder / f"{local_files.INCOMPLETE}{self.target.name}-{self.key}"

    def steps(self) -> Steps:
        """The work of the save in its order. An error of one rank is an error of all.

        Raises:
            SaveError: If the disk of any rank fails, or another run has taken the folder.
        """
        try:
            yield from self._work()
        except FolderLostError as error:
            raise self._save_error("save-folder-lost") from error
        except OSError as error:
            try:
                yield from self._clean_up()
            except FolderLostError:
                raise self._save_error("save-folder-lost") from error
            except OSError:
                pass  # the next save removes what cannot be removed now
            raise self._save_error("save-failed", error=error) from error

    def _work(self) -> Steps:
        self.warnings += yield RankWork(self._prepare, on_all=False)
        written: list[Mapping[str, FileRecord]] = []  # on the first rank
        yield RankWork(self._write, on_all=True, merge=written.extend)
        self.warnings += yield RankWork(lambda: self._complete(written), on_all=False)

    def _clean_up(self) -> Steps:
        yield RankWork(self._require_folder, on_all=False)
        yield RankWork(lambda: local_files.remove_temporary(self.folder), on_all=False)

    def _save_error(self, code: str, **values: object) -> SaveError:
        folder = self.shown_folder
        return SaveError(Problem(code, iteration=self.iteration, folder=folder, **values))

    def _require_folder(self) -> None:
        """Checks that --save still belongs to this run.

        Also before a save is published, the pointers name it, or its files are removed: during a
        long save, another run may have taken the folder of a suspended one.

        Raises:
            FolderLostError: If another run has taken the folder.
            OSError: If the lock can be neither read nor written.
        """
        if self.lock is not None and not self.lock.is_held():
            raise FolderLostError

    def _prepare(self) -> list[Problem]:
        """Creates the temporary folder; warns if the disk may become full."""
        self._require_folder()
        local_files.remove_temporary(self.folder)
        self.temporary.mkdir(parents=True)
        assert self.run is not None
        newest = local_files.size_of_newest(self.folder, has_optimizer=self.run.has_optimizer)
        return self._check_free_space(newest or self.estimate)

    def _check_free_space(self, needed: float) -> list[Problem]:
        """Warns if the disk has less free space than these bytes."""
        free = shutil.disk_usage(self.folder).free
        if free >= needed:
            return []
        return [
            Problem(
                "disk-may-become-full", folder=self.folder, free=free / 1e9, needed=needed / 1e9
            )
        ]

    def _write(self) -> Mapping[str, FileRecord]:
        """Writes the files of this rank, once it sees the folder that the first one has created."""
        retry(self.temporary.is_dir, wanted=True)
        return self.snapshot.write(self.temporary)

    def _complete(self, written: Sequence[Mapping[str, FileRecord]]) -> list[Problem]:
        """Completes the checkpoint, gives it its name, and removes old ones.

        Args:
            written: Records of the files that each rank wrote.

        Returns:
            Problems that did not fail the save.

        Raises:
            FolderLostError: If another run has taken the folder.
        """
        local_files.wait_for_files(self.temporary, _joined(written))
        (self.temporary / POINTER_PENDING).touch()
        local_files.write_files(self.temporary, self.description(written))
        self._require_folder()
        local_files.publish(self.temporary, self.target)
        return self._update_pointers()

    def description(self, written: Sequence[Mapping[str, FileRecord]]) -> dict[str, bytes]:
        """Contents of the files that no rank has written, by name; the manifest is the last.

        Args:
            written: Records of the files that each rank wrote.
        """
        assert self.run is not None
        texts = {f"{TOKENIZER}/{name}": text for name, text in self.tokenizer_files.items()}
        texts[RUN] = local_files.json_content(self.run.to_dict())
        records = {name: FileRecord.of(text) for name, text in texts.items()}
        return {**texts, MANIFEST: manifest_text(_joined(written) | records).encode()}

    def _update_pointers(self) -> list[Problem]:
        """Updates pointers and removes old checkpoints; errors of the disk do not fail the save.

        Raises:
            FolderLostError: If another run has taken the folder.
        """
        assert self.run is not None
        try:
            local_files.write_pointers(self.target, self._require_folder)
            if self.retention is not None:
                self._require_folder()
                local_files.remove_older(self.target, self.run.branch, self.retention)
        except FolderLostError:
            raise
        except OSError as error:
            return [Problem("save-pointers-failed", target=self.target, error=error)]
        return []


def _joined(written: Sequence[Mapping[str, FileRecord]]) -> dict[str, FileRecord]:
    return {name: record for part in written for name, record in part.items()}


class SaveInProgress:
    """A save whose steps are done one after the other, on every rank.

    Args:
        save: The save.
        ranks: All ranks.
        started: When the save began, before the snapshot, by time.monotonic.
        in_background: Do the work of each step in a thread. Otherwise it is done when the results
            are exchanged.
    """

    def __init__(
        self, save: SaveSteps, ranks: CollectiveIO, started: float, *, in_background: bool
    ) -> None:
        self.save = save
        self._started = started
        self._ranks = ranks
        self.in_background = in_background
        self._steps = save.steps()
        self._begin(next(self._steps))
        self.stalled = time.monotonic() - started
        """Seconds that training has waited so far."""

    def times(self, waited: float) -> dict[str, float]:
        """Seconds since the start of a completed save, and seconds that training waited for it."""
        seconds = time.monotonic() - self._started
        return {"seconds": round(seconds, 3), "waited": round(self.stalled + waited, 3)}

    def background_line(self, waited: float) -> str:
        """Describes a completed background save, for the log. `waited` is the time in seconds that
        training waited for it."""
        written = time.monotonic() - self._started - self.stalled
        stall = f"; training waited {waited:.1f} s for it" if waited else ""
        return f"it was written in the background within {written:.1f} s{stall}"

    def advance(self, *, wait: bool) -> bool:
        """Continues with the next step if all ranks have finished theirs. Collective.

        Args:
            wait: Wait for all steps.

        Returns:
            Whether the save has completed.

        Raises:
            SaveError: If it has failed.
        """
        while wait or self._ranks.is_true_on_all(not self.in_background or self._own.done()):
            try:
                self._begin(self._exchange())
            except StopIteration:
                return True
            if not wait:
                break
        return False

    def abandon(self) -> None:
        """Ends the writing of this rank, which leaves an incomplete checkpoint. Local."""
        self.save.snapshot.cancel()
        if self.in_background:
            self._thread.join(ABANDON_S)

    def _begin(self, work: RankWork) -> None:
        self._work = work
        self._own: Future[Outcome] = Future()
        self._thread = threading.Thread(target=self._do_own, name="checkpoint", daemon=True)
        if self.in_background:
            self._thread.start()

    def _do_own(self) -> None:
        """Does this rank's part of a step."""
        try:
            self._own.set_result(self._ranks.do_own(self._work))
        except BaseException as error:
            self._own.set_exception(error)

    def _exchange(self) -> RankWork:
        """Exchanges the results of a step and returns the next one.

        Raises:
            StopIteration: If there is none.
        """
        if not self.in_background:
            self._do_own()
        outcome = self._own.result()  # raises any error but errors of the disk and of data
        try:
            result = self._ranks.share(self._work, outcome)
        except OSError as error:
            return self._steps.throw(error)
        return self._steps.send(result)
