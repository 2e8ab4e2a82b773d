"""Submits a run as a job, if Slurm and the settings of the run allow it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ds.config import yaml_file
from megatron_ds.config.options.checkpoint import is_url
from megatron_ds.config.problems import Problem, UserError, option
from megatron_ds.reports.history import run_problems
from megatron_ds.slurm.job_file import FILE, job_file
from megatron_ds.slurm.jobs import call, job_problems
from megatron_ds.slurm.options import Submit
from megatron_ds.slurm.records import OUTPUT, record
from megatron_ds.slurm.run_settings import check_run
from megatron_ds.slurm.time_limit import seconds_of

SBATCH_SET = {
    "nodes": "nodes",
    "ntasks": "ranks_per_node",
    "ntasks-per-node": "ranks_per_node",
    "gpus-per-node": "gpus_per_node",
    "cpus-per-task": "cpus_per_rank",
    "mincpus": "cpus_per_rank",
    "time": "time",
    "signal": "signal_seconds",
}
"""Options of sbatch that have flags here."""


def submit(options: Submit, training: Sequence[str]) -> None:
    """Writes the job's file into the folder of the run, and submits it; or prints the file."""
    run = Path(options.run)
    if not training and (run / yaml_file.FILE_NAME).is_file():
        training = ["--config", str(run / yaml_file.FILE_NAME)]
    problems = list(_job_problems(options))
    flags, counts, run_problems = check_run(options, training)
    if problems := [*problems, *run_problems]:
        raise UserError(*problems)
    text = job_file(options, counts, flags)
    if options.print_file:
        print(text, end="")
        return
    run.mkdir(parents=True, exist_ok=True)
    (run / FILE).write_text(text, encoding="utf-8")
    job = call("sbatch", "--parsable", run / FILE).strip().partition(";")[0]
    record(run, event="submit", job=job)
    print(f"submitted {run / FILE} as job {job}; its output: {run / OUTPUT}")
    if idle := [str(count) for count in options.node_range if count not in counts]:
        print(f"with {', '.join(idle)} nodes it leaves some idle, which the settings do not fit")


def _job_problems(options: Submit) -> Iterator[Problem]:
    """Yields reasons that the job cannot be submitted."""
    if not options.node_range:
        yield Problem("slurm-not-nodes", settings=options)
    if is_url(options.run):
        yield Problem("slurm-run-is-url", "run", run=options.run)
    for value in options.sbatch:
        if (name := value.partition("=")[0]) in SBATCH_SET:
            flag = option(SBATCH_SET[name])
            yield Problem("slurm-option-has-flag", "sbatch", value=value, other=flag)
    if options.time is not None:
        limit = seconds_of(options.time)
        if limit is None:
            yield Problem("slurm-not-a-time", settings=options)
        elif limit <= options.signal_seconds:
            yield Problem("slurm-signal-before-start", settings=options, limit=limit)
    for name in ("program", "template"):
        if (path := getattr(options, name)) is not None:
            yield from run_problems(name, [path], may_start=True)
    if options.print_file:
        return
    if shutil.which("sbatch") is None:
        yield Problem("slurm-missing", program="sbatch")
    else:
        yield from job_problems(Path(options.run))
