"""A job array of Slurm, whose tasks are the job files of a ladder's runs."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.config.problems import UserError, raise_if_any
from megatron_ds.ladder.options import Run
from megatron_ds.ladder.records import RUN_NAME, LadderRecord, RunEntry
from megatron_ds.slurm.job_file import FILE, job_file
from megatron_ds.slurm.jobs import call, job_problems
from megatron_ds.slurm.options import Submit
from megatron_ds.slurm.records import OUTPUT, record
from megatron_ds.slurm.run_settings import check_run

DIRECTIVE = "#SBATCH --"
OF_ONE_RUN = ("job-name=", "output=")
"""Options of a run's job that the array has for all."""


def submit(options: Run, ladder: LadderRecord, runs: Sequence[RunEntry]) -> None:
    """Writes the job file of each run and that of the array, and submits the array.

    A task of the array is a job of its own, which Slurm queues again as it does that of a single
    run.

    Raises:
        UserError: If the settings of a run have problems, one of them has a job that is alive, or
            Slurm refuses the job.
    """
    raise_if_any(
        problem.with_prefix(f"{run.name}: ")
        for run in runs
        for problem in job_problems(ladder.save_of(run))
    )
    for run in runs:
        _write_job(options, ladder, run)
    path = ladder.folder / FILE
    path.write_text(array_file(ladder, runs), encoding="utf-8")
    job = call("sbatch", "--parsable", path).strip().partition(";")[0]
    for run in runs:
        record(ladder.save_of(run), event="submit", job=f"{job}_{ladder.runs.index(run)}")
    print(f"submitted {path} as job {job}, a task of it for each of {len(runs)} runs")
    print(f"    python tools/slurm.py status {ladder.save_of(runs[0])}")
    print("once all are complete:")
    print(f"    python tools/ladder.py fit {ladder.folder}")


def _write_job(options: Run, ladder: LadderRecord, run: RunEntry) -> None:
    """Writes the job file of a run, which sbatch accepts by itself as well."""
    save = ladder.save_of(run)
    job = Submit(
        run=str(save),
        ranks_per_node=ladder.ranks,
        gpus_per_node=options.gpus_per_run,
        time=options.time,
        sbatch=options.sbatch,
    )
    flags, counts, problems = check_run(job, ["--config", str(ladder.settings_of(run))])
    if problems:
        raise UserError(*problems)
    save.mkdir(parents=True, exist_ok=True)
    (save / FILE).write_text(job_file(job, counts, flags), encoding="utf-8")


def array_file(ladder: LadderRecord, runs: Sequence[RunEntry]) -> str:
    """The file of the array: the options of the jobs, and which task runs which job file.

    Args:
        ladder: The ladder.
        runs: Runs whose job files are written; the number of a task is that of its run.
    """
    folder = Path(os.path.abspath(ladder.folder))
    lines = (ladder.save_of(runs[0]) / FILE).read_text(encoding="utf-8").splitlines()
    options = [line for line in lines if line.startswith(DIRECTIVE)]
    shared = [line for line in options if not line[len(DIRECTIVE) :].startswith(OF_ONE_RUN)]
    output = str(folder).replace("%", "%%") + f"/{RUN_NAME}%a/{OUTPUT}"
    tasks = ",".join(str(ladder.runs.index(run)) for run in runs)
    return "\n".join(
        [
            "#!/bin/bash",
            "# Written by tools/ladder.py run: the number of a task is that of its run.",
            f"{DIRECTIVE}job-name={shlex.quote(folder.name)}",
            f"{DIRECTIVE}array={tasks}",
            f"{DIRECTIVE}output={shlex.quote(output)}",
            *shared,
            "",
            f'exec bash {shlex.quote(str(folder))}/{RUN_NAME}"$SLURM_ARRAY_TASK_ID"/{FILE}',
            "",
        ]
    )
