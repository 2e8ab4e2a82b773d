"""Decides which steps --profile measures, on which ranks and into which folder.

The profiler itself is imported when the first such step begins; nothing is installed before or
after. Knows no files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.launch import output
from megatron_ds.train_state import TrainState

if TYPE_CHECKING:  # imports torch's profiler
    from megatron_ds.training.profile.profiler import ProfilerSession


class Profiling:
    """The profile of a run, on one rank.

    Args:
        config: Configuration of the run.
        engine: Engine whose steps are measured.
        folder: Folder of the files.
        rank: Global rank of this process.
        write: Prints lines.
        warn: Prints a warning.
    """

    def __init__(
        self,
        config: Config,
        engine: ZeroEngine,
        folder: Path | None,
        rank: int,
        write: Callable[[str], object],
        warn: Callable[[Problem], object],
    ) -> None:
        options = config.profiling
        self._first = options.profile_step_start + 1
        self._last = options.profile_step_end
        self._is_on = options.profile and rank in options.profile_ranks
        self._engine = engine
        self._folder = folder
        self._rank = rank
        self._write = write
        self._warn = warn
        self._session: ProfilerSession | None = None

    def before_step(self, iteration: int) -> None:
        """Begins the profile, or its next step, if this iteration is measured."""
        if not (self._is_on and self._first <= iteration <= self._last):
            return
        if self._session is None:
            try:
                self._session = self._start(iteration)
            except OSError as error:
                self._give_up(error)
                return
        self._session.next_step(iteration)

    def after_step(self, iteration: int) -> None:
        """Ends the profile after its last step."""
        if iteration >= self._last:
            self.finish()

    def finish(self) -> None:
        """Ends the profile, if one is being taken. A disk that fails costs a warning."""
        session = self._session
        self._session = None
        if session is None:
            return
        try:
            session.finish()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_on = False
        self._warn(Problem("profile-not-written", folder=self._folder, error=error))

    def _start(self, iteration: int) -> ProfilerSession:
        from megatron_ds.training.profile.profiler import ProfilerSession

        assert self._folder is not None
        name = f"rank{self._rank}-iteration{iteration}"
        return ProfilerSession(self._engine, self._folder, name, self._write)


def open_profiling(
    config: Config, engine: ZeroEngine, save: Path | None, rank: int, state: TrainState, last: int
) -> Profiling | None:
    """The profile of --profile; warns if the run ends before it begins.

    Args:
        config: Configuration of the run.
        engine: Engine whose steps are measured.
        save: The local folder of --save.
        rank: Global rank of this process.
        state: State from which the run starts.
        last: Last iteration of the run.
    """
    options = config.profiling
    if not options.profile:
        return None
    first = max(options.profile_step_start, state.iteration) + 1
    if last < first <= options.profile_step_end:
        output.warn_on_rank(Problem("profile-after-the-end", first=first, last=last))
    write = partial(output.print_on_rank, rank_to_print=min(options.profile_ranks))
    folder = profile_folder(config, save)
    return Profiling(config, engine, folder, rank, write, output.warn_on_rank)


def profile_folder(config: Config, save: Path | None) -> Path | None:
    """--profile-dir, or the folder profile in --tensorboard-dir or --save.

    Args:
        config: Configuration of the run.
        save: The local folder of --save.
    """
    if config.profiling.profile_dir is not None:
        return Path(config.profiling.profile_dir)
    if config.logging.tensorboard_dir is not None:
        return Path(config.logging.tensorboard_dir, "profile")
    return None if save is None else save / "profile"
