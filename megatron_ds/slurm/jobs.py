"""Jobs as Slurm's own programs show and change them."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.slurm.records import last_job

ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "PREEMPTED")
"""States of a job that is queued or runs."""


def call(*words: object) -> str:
    """The output of a program of Slurm.

    Raises:
        UserError: If it fails or is not installed.
    """
    command = [str(word) for word in words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise user_error("slurm-missing", program=command[0]) from None
    if done.returncode:
        raise user_error("slurm-failed", command=shlex.join(command), error=done.stderr.strip())
    return done.stdout


def job_fields(job: str) -> dict[str, str]:
    """Returns Slurm's fields of a job; empty if there are none."""
    try:
        shown = call("scontrol", "show", "job", "-o", job)
    except UserError as error:
        if error.problems[0].code == "slurm-missing":
            raise
        return {}
    return dict(re.findall(r"(\w+)=(\S*)", shown))


def job_problems(run: Path) -> Iterator[Problem]:
    """Yields a problem if the last job of a run is queued or runs.

    Args:
        run: Folder of the run.
    """
    job = last_job(run)
    if job is not None and (state := job_fields(job).get("JobState")) in ALIVE:
        yield Problem("slurm-job-is-alive", "run", job=job, state=state)
