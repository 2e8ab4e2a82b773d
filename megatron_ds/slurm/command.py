"""Runs of pretrain_gpt.py as jobs of Slurm: submits one, shows its state, follows its output.

The job's file is examples/slurm/pretrain_gpt.sbatch with the settings of the run. Slurm's own
programs do everything else.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.cli.subcommands import Commands, run_command
from megatron_ds.reports.live import Follower, frame
from megatron_ds.slurm.jobs import ALIVE, job_fields
from megatron_ds.slurm.options import PROGRAM, Restart, Status, Submit, Tail
from megatron_ds.slurm.records import OUTPUT, records, require_job
from megatron_ds.slurm.restart import restart
from megatron_ds.slurm.submit import submit

POLL_S = 0.5
"""Seconds between reads of a job's output."""
STATE_S = 5.0
"""Seconds between queries of a job's state."""


def status(options: Status, _: Sequence[str]) -> None:
    """Prints the job of a run, the ends of its attempts, and a frame with the run's progress."""
    from rich.console import Console

    run = Path(options.run)
    job = require_job(run)
    fields = job_fields(job)
    if fields:
        where = f" on {fields['NodeList']}" if fields["JobState"] == "RUNNING" else ""
        where = where or (f" ({fields['Reason']})" if fields["JobState"] == "PENDING" else "")
        restarts, used, limit = (fields[key] for key in ("Restarts", "RunTime", "TimeLimit"))
        print(f"job {job}: {fields['JobState']}{where}, {used} of {limit}, {restarts} restarts")
    else:
        print(f"job {job}: Slurm does not know it any more")
    for item in records(run):
        if item["event"] == "end" and item["job"] == job:
            print(f"  attempt ended with status {item['status']} at iteration {item['iteration']}")
    follower = Follower(run)
    console = Console(highlight=False)
    follower.poll()
    console.print(frame(run.resolve().name, follower, console.width, has_dots=False))


def tail(options: Tail, _: Sequence[str]) -> None:
    """Prints the last lines of a job's output, and what the job adds until it ends."""
    run = Path(options.run)
    job = require_job(run)
    path = run / OUTPUT
    offset = 0
    for poll in itertools.count():
        is_alive = poll % (STATE_S / POLL_S) or job_fields(job).get("JobState") in ALIVE
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                text = b"".join(deque(file, None if poll else options.lines))
                offset = file.tell()
            print(text.decode(errors="replace"), end="", flush=True)
        if not is_alive:
            return
        time.sleep(POLL_S)


COMMANDS: Commands = {
    "submit": (Submit, submit),
    "status": (Status, status),
    "tail": (Tail, tail),
    "restart": (Restart, restart),
}


def main(argv: Sequence[str]) -> int:
    return run_command(PROGRAM, COMMANDS, argv, with_training=("submit", "restart"))
