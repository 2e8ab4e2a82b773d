"""Decides when a run saves checkpoints, and handles a save that fails.

How a checkpoint is written is up to `megatron_ds.checkpoint.saving`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_ds.checkpoint.save_steps import SaveError
from megatron_ds.checkpoint.saving import Saving
from megatron_ds.config import CheckpointConfig
from megatron_ds.config.problems import Problem, option
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.launch import output
from megatron_ds.train_state import TrainState


@dataclass(frozen=True)
class Saver:
    """The saves of a run. Methods are collective, and do nothing without a --save folder."""

    options: CheckpointConfig
    saving: Saving
    engine: ZeroEngine

    def is_due(self, iteration: int) -> bool:
        """Whether --save-interval or --save-interval-minutes demands a save after an iteration."""
        interval = self.options.save_interval
        minutes = self.options.save_interval_minutes
        if self.options.save is None:
            return False
        # Every rank must make the same collective calls.
        is_late = minutes is not None and self.saving.minutes_have_passed(minutes)
        return is_late or (interval is not None and iteration % interval == 0)

    def save(
        self,
        state: TrainState,
        history: Callable[[], BlendHistory | None],
        *,
        final: bool,
        after_skip: bool = False,
    ) -> None:
        """Saves a checkpoint after the last save has completed.

        Args:
            state: State after the last step.
            history: Returns the consumption of the training data.
            final: The run ends with this checkpoint, so a failed save is an error in any case, and
                the save is not made in the background.
            after_skip: The last step was skipped.

        Raises:
            SaveError: If the save fails, and the run ends with it.
        """
        if self.options.save is None:
            return
        self.finish(final=False)
        in_background = self.options.async_save and not final
        with _warn_of_errors(self.options, final=final):
            self.saving.save(
                self.engine, state, history, in_background=in_background, after_skip=after_skip
            )

    def is_local_due(self, iteration: int) -> bool:
        """Whether --local-save-interval demands a save after an iteration."""
        interval = self.options.local_save_interval
        options = self.options
        if interval is None or options.local_checkpoint_dir is None or options.save is None:
            return False
        return iteration % interval == 0

    def save_local(self, state: TrainState, history: Callable[[], BlendHistory | None]) -> None:
        """Saves a checkpoint to the disks of the nodes; an error is a warning.

        Args:
            state: State after the last step.
            history: Returns the consumption of the training data.
        """
        self.saving.save_local(self.engine, state, history)

    def advance(self) -> None:
        """Continues a save in the background; waits for no disk.

        Raises:
            SaveError: If it has failed, and the run ends with it.
        """
        with _warn_of_errors(self.options, final=False):
            self.saving.advance(wait=False)

    def finish(self, *, final: bool) -> None:
        """Waits for a save in the background.

        Args:
            final: The run ends with this checkpoint.

        Raises:
            SaveError: If it fails, and the run ends with it.
        """
        with _warn_of_errors(self.options, final=final):
            self.saving.advance(wait=True)


@contextmanager
def _warn_of_errors(options: CheckpointConfig, *, final: bool) -> Iterator[None]:
    """Turns a failed save into a warning if the run continues."""
    try:
        yield
    except SaveError as error:
        is_lost = error.problem.code == "save-folder-lost"  # each later save would fail, too
        if final or is_lost or options.on_save_error == "exit":
            raise
        flag = option("on_save_error")
        output.warn_on_rank(Problem("save-skipped", problem=error.problem, flag=flag))
