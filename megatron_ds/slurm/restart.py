"""The end of a run: its job is queued again, if another attempt can complete the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_ds.config.options.checkpoint import is_url
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.reports.live import Follower
from megatron_ds.slurm.jobs import call, job_fields
from megatron_ds.slurm.options import PROGRAM, Restart
from megatron_ds.slurm.records import record, records
from megatron_ds.slurm.run_settings import settings_of

ENDS = (
    ExitCode.FINISHED,
    ExitCode.ERROR,
    ExitCode.BAD_SETTINGS,
    ExitCode.SKIPPED_STEPS,
    ExitCode.SAVE_FAILED,
    ExitCode.FAULTY_RANK,
    ExitCode.INTERRUPTED,
)
"""Statuses after which another attempt would end equally, or that a user has asked for."""
FUTILE = 3
"""Number of consecutive attempts without a newer checkpoint after which the job is not queued
again."""


def restart(options: Restart, training: Sequence[str]) -> int:
    """Queues the job again unless a reason says that it ends; returns the status of the run."""
    save = settings_of(training).checkpoint.save
    where = ""
    if save is not None and not is_url(save):
        iteration = _progress(Path(save))
        where = f" at iteration {iteration}"
        reason = _reason_to_end(options, Path(save), iteration)
        ended = {"status": options.status, "iteration": iteration}
        with suppress(OSError):  # a full disk; the job is queued again all the same
            record(Path(save), event="end", job=options.job, **ended)
    elif save is not None and options.status == ExitCode.TERMINATED:
        reason = ""  # the signal of the time limit, after which nothing needs to be known
    else:
        reason = "there is no --save folder that tells whether another attempt would help"
    outcome = f"the job ends: {reason}" if reason else "the job is queued again"
    print(f"{PROGRAM}: the run ended with status {options.status}{where}; {outcome}", flush=True)
    if not reason:
        call("scontrol", "requeue", options.job)
    return options.status


def _progress(run: Path) -> int:
    """Iteration of the newest checkpoint, or of the latest start of the run if that is newer."""
    follower = Follower(run)
    follower.poll()
    known = [item for item in follower.history.events if item["event"] in ("start", "checkpoint")]
    return int(known[-1]["iteration"]) if known else max(follower.history.checkpoints, default=0)


def _reason_to_end(options: Restart, run: Path, iteration: int) -> str:
    """Returns the reason that a job is not queued again, such as a run that is complete, or ""."""
    if options.status in ENDS:
        return "another attempt would not change that" if options.status else "the run is complete"
    ends = [item for item in records(run) if item["event"] == "end" and item["job"] == options.job]
    before = [item["iteration"] for item in ends[1 - FUTILE :]]
    if len(before) == FUTILE - 1 and {*before} == {iteration}:
        return f"{FUTILE} attempts in a row left no newer checkpoint"
    state = job_fields(options.job).get("JobState")
    return "" if state in ("RUNNING", None) else f"it is {state}"  # such as cancelled
