"""Trains the runs of a ladder: in this process, by Slurm, or over Ray.

In this process the libraries are loaded once for all runs. Slurm and Ray start what they always
start: Slurm the job file of each run as a task of an array, Ray this program for each run.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_ds.config.problems import Problem, counted, raise_if_any, user_error
from megatron_ds.ladder.options import Run
from megatron_ds.ladder.records import LadderRecord, RunEntry, read_ladder
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.output import print_error
from megatron_ds.launch.startup_timer import process_age
from megatron_ds.programs import start_words
from megatron_ds.reports.history import METRICS, History, RunReader
from megatron_ds.training.extensions import Callback, Extensions

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from megatron_ds.train_state import StepResult, TrainState

OUTPUT = "output.log"
"""What a run prints, in its folder."""
POLL_S = 0.5
"""Seconds between two looks at the metrics of a run in other processes."""


def train(options: Run) -> tuple[int, bool]:
    """Trains the runs that are not complete.

    Returns:
        The exit status, and whether all runs of the ladder are complete.

    Raises:
        UserError: If there is no run of a name, or a launcher fails.
    """
    ladder = read_ladder(Path(options.folder))
    raise_if_any(_name_problems(options, ladder))
    chosen = [run for run in ladder.runs if not options.only or run.name in options.only]
    open_runs = [run for run in chosen if not is_complete(ladder, run)]
    if open_runs and options.launcher == "slurm":
        from megatron_ds.ladder.slurm_array import submit

        submit(options, ladder, open_runs)
        return ExitCode.FINISHED, False
    status: int = ExitCode.FINISHED
    if open_runs and options.launcher == "ray":
        _train_over_ray(options, ladder, open_runs)
    elif open_runs:
        status = _train_here(ladder, open_runs)
    return status, not status and all(is_complete(ladder, run) for run in ladder.runs)


def _name_problems(options: Run, ladder: LadderRecord) -> Iterator[Problem]:
    names = [run.name for run in ladder.runs]
    for name in options.only:
        if name not in names:
            yield Problem("ladder-without-run", "only", name=name, valid=", ".join(names))


def history_of(ladder: LadderRecord, run: RunEntry) -> History | None:
    """What a run has recorded; None before its first step."""
    if not (ladder.save_of(run) / METRICS).is_file():
        return None
    reader = RunReader(ladder.save_of(run))
    reader.read()
    return reader.history if len(reader.history) else None


def is_complete(ladder: LadderRecord, run: RunEntry) -> bool:
    """Whether a run has made its last step and evaluated it."""
    history = history_of(ladder, run)
    return history is not None and final_loss(history, run.steps) is not None


def final_loss(history: History, steps: int) -> float | None:
    """The validation loss after the last step, a mean over the datasets; None if there is none."""
    losses = [loss for iteration, loss in history.losses("validation") if iteration == steps]
    return float(np.mean(losses)) if losses else None


class _Counter(Callback):
    """Shows the steps of a run as progress."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self._progress.update(self._task, completed=state.iteration)


@dataclass(frozen=True)
class _Bars:
    """Progress of the runs at the terminal, on stderr."""

    progress: Progress
    tasks: dict[str, TaskID]

    @classmethod
    def of(cls, runs: Sequence[RunEntry]) -> _Bars:
        """A bar for each run."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        progress = Progress(
            *columns,
            console=Console(file=sys.stderr),
            redirect_stdout=False,
            redirect_stderr=False,
        )
        tasks = {
            run.name: progress.add_task(
                f"{run.name}: {run.layers} x {run.hidden_size}", total=run.steps, start=False
            )
            for run in runs
        }
        return cls(progress, tasks)


def _train_here(ladder: LadderRecord, runs: Sequence[RunEntry]) -> int:
    """Trains runs one after the other, and prints how much of the time was steps."""
    bars = _Bars.of(runs)
    start = time.monotonic() - process_age()
    with bars.progress:
        for run in runs:
            bars.progress.start_task(bars.tasks[run.name])
            ladder.save_of(run).mkdir(parents=True, exist_ok=True)
            words = ["--config", str(ladder.settings_of(run))]
            train_one = _in_this_process if ladder.ranks == 1 else _in_other_processes
            status = train_one(ladder, run, words, bars)
            if status:
                print_error(Problem("ladder-run-failed", name=run.name, status=status).render())
                print_error(f"its output: {ladder.save_of(run) / OUTPUT}")
                return status
    elapsed = time.monotonic() - start
    steps = sum(step_seconds(ladder, run) for run in runs)
    print(
        f"{counted(len(runs), 'run')} in {elapsed:.1f} s from the start of the program, "
        f"{steps:.1f} s of them training steps: {elapsed / steps:.3f} times"
    )
    return ExitCode.FINISHED


def step_seconds(ladder: LadderRecord, run: RunEntry) -> float:
    """Sum of the times of a run's training steps."""
    history = history_of(ladder, run)
    return 0.0 if history is None else float(np.nansum(history["seconds"]))


def _in_this_process(ladder: LadderRecord, run: RunEntry, words: Sequence[str], bars: _Bars) -> int:
    from megatron_ds.launch.process.lifecycle import guest_lifecycle
    from megatron_ds.training.run import run as run_training

    counter = _Counter(bars.progress, bars.tasks[run.name])
    with (
        (ladder.save_of(run) / OUTPUT).open("a", encoding="utf-8") as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
        guest_lifecycle() as life,
    ):
        try:
            record = run_training(Extensions(callbacks=(counter,)), words, life, is_guest=True)
        except RunAborted as error:
            print_error(str(error))
            return int(error.code)
    return int(record.status)


def _in_other_processes(
    ladder: LadderRecord, run: RunEntry, words: Sequence[str], bars: _Bars
) -> int:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [sys.executable, *launcher, str(ladder.ranks), *start_words("train")]
    reader = RunReader(ladder.save_of(run))
    with (ladder.save_of(run) / OUTPUT).open("a", encoding="utf-8") as file:
        process = subprocess.Popen([*command, *words], stdout=file, stderr=file)
        try:
            while process.poll() is None:
                with contextlib.suppress(FileNotFoundError):
                    reader.read()
                bars.progress.update(bars.tasks[run.name], completed=len(reader.history))
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:  # Ctrl-C reaches the run as well, which saves
                process.wait()
    return process.returncode


def _train_over_ray(options: Run, ladder: LadderRecord, runs: Sequence[RunEntry]) -> None:
    """Runs this program for each run as a task of a Ray cluster."""
    from megatron_ds.launch.ranks.ray_cluster import RayCluster

    words = [*start_words("ladder"), "run", options.folder, "--only"]
    commands = {run.name: [*words, run.name] for run in runs}
    with RayCluster(options.ray_address) as cluster:
        cluster.run(commands, options.ray_cores, print_error, noun="runs")
    if missing := [run.name for run in runs if not is_complete(ladder, run)]:
        raise user_error("ladder-runs-incomplete", names=", ".join(missing))
