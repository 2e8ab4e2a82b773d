"""Saves and restores the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_ds.checkpoint.folders.run_lock import RunLock
from megatron_ds.checkpoint.restoring import Restoring
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.checkpoint.saving import Saving


class CheckpointManager:
    """Saves and restores the checkpoints of one run.

    Attributes:
        saving: Saves checkpoints to --save and --local-checkpoint-dir.
        restoring: Selects and loads the checkpoint of --load.
    """

    def __init__(
        self,
        run: RunCheckpoints,
        lock: RunLock | None = None,
        on_saved: Callable[..., object] | None = None,
    ) -> None:
        """Prepares a run's saves and its resume. See `Saving` for the arguments."""
        self.saving = Saving(run, lock, on_saved)
        self.restoring = Restoring(run)

    @property
    def newest(self) -> Path | None:
        """The checkpoint that this run has saved last or, before its first save, loaded."""
        return self.saving.newest or self.restoring.loaded
