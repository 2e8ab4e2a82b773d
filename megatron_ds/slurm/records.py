"""Records of jobs in the folder of a run: their output, submissions and ends of attempts."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.reports.history import RecordFile

OUTPUT = "slurm.out"
"""The jobs' output, in the folder of the run."""
RECORD = "slurm.jsonl"
"""Submissions and ends of attempts, in the folder of the run."""


def record(run: Path, **values: Any) -> None:
    """Adds a record with the time to the folder of a run."""
    path = run / RECORD
    end = path.read_bytes()[-1:] if path.is_file() else b""
    with path.open("a", encoding="utf-8") as file:
        # A write to a full disk may have left a part of a line.
        separator = "" if end in (b"", b"\n") else "\n"
        file.write(separator + json.dumps({**values, "time": round(time.time(), 3)}) + "\n")


def records(run: Path) -> list[dict[str, Any]]:
    """The records in the folder of a run, without damaged lines."""
    records: list[dict[str, Any]] = []
    with suppress(FileNotFoundError):
        RecordFile(run / RECORD, records.append, records.clear, skip_damaged=True).read()
    return records


def last_job(run: Path) -> str | None:
    """The number of the job that a run has had last, if it has had one."""
    jobs = [str(record["job"]) for record in records(run)]
    return jobs[-1] if jobs else None


def require_job(run: Path) -> str:
    """Number of the run's last job.

    Raises:
        UserError: If the run has had no job.
    """
    job = last_job(run)
    if job is None:
        raise user_error("slurm-no-job", "run", run=run)
    return job
