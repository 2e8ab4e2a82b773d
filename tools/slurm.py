#!/usr/bin/env python
"""Runs of pretrain_gpt.py as jobs of Slurm: submits one, shows its state, follows its output.

The job's file is examples/slurm/pretrain_gpt.sbatch with the settings of the run. Slurm's own
programs do everything else.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ds.cli import arguments
from megatron_ds.cli.command import print_warning, table_of
from megatron_ds.cli.subcommands import Command, Commands, run_command
from megatron_ds.config import Config, yaml_file
from megatron_ds.config.fields import UNSET_INT, option_field
from megatron_ds.config.options.checkpoint import is_same_path, is_url
from megatron_ds.config.problems import Problem, UserError, option, user_error
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.reports.history import RecordFile, run_problems
from megatron_ds.reports.live import Follower, frame
from megatron_ds.training.run import complete_settings

PROGRAM = "slurm.py"
REPOSITORY = Path(__file__).resolve().parent.parent
PRETRAIN = REPOSITORY / "pretrain_gpt.py"
TEMPLATE = REPOSITORY / "examples" / "slurm" / "pretrain_gpt.sbatch"
FILE, OUTPUT, RECORD = "slurm.sbatch", "slurm.out", "slurm.jsonl"
"""Files of a run's folder: the job's file and output; submissions and ends of attempts."""
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
ALIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "PREEMPTED")
ENDS = (
    *(ExitCode.FINISHED, ExitCode.ERROR, ExitCode.BAD_SETTINGS, ExitCode.SKIPPED_STEPS),
    *(ExitCode.SAVE_FAILED, ExitCode.FAULTY_RANK, ExitCode.INTERRUPTED),
)
"""Statuses after which another attempt would end equally, or that a user has asked for."""
FUTILE = 3
"""Attempts in a row that end with the same newest checkpoint, after which there is no other."""
POLL_S, STATE_S = 0.5, 5.0
NEXT_LINE = " \\\n    "
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


@dataclass(frozen=True)
class Submit(Command):
    """Writes RUN/slurm.sbatch, and submits it: a job that trains until the run is complete.

    Before its time limit the run saves, and the job is queued again; so it is after the loss of a
    node or rank, and after a hang. It ends when the run is complete or has an error, and when three
    attempts in a row leave the same newest checkpoint.

        python tools/slurm.py submit runs/first --nodes 4 --ranks-per-node 8 --time 8:00:00 \\
            --config run.yaml

    Accepts all flags of pretrain_gpt.py; --save and --load are RUN. Without any, the settings are
    from RUN/config.yaml. `sbatch RUN/slurm.sbatch` submits the job again.
    """

    run: str = option_field(
        "", "--save folder of the run", metavar="RUN", positional=True, required=True
    )
    nodes: str = option_field(
        "1",
        "number of nodes, or the least and the most, such as 2-4: the job continues on the nodes "
        "that are left",
        metavar="N[-N]",
    )
    ranks_per_node: int = option_field(
        UNSET_INT, "number of processes per node", required=True, minimum=1
    )
    gpus_per_node: int | None = option_field(
        None, "number of GPUs per node (default: --ranks-per-node); 0 requests none", minimum=0
    )
    cpus_per_rank: int = option_field(1, "least number of CPUs per process", minimum=1)
    time: str | None = option_field(
        None,
        "time limit of an attempt, as of sbatch: MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS and "
        "others (default: the partition's)",
        metavar="TIME",
    )
    signal_seconds: int = option_field(
        120, "seconds before the time limit at which the run saves and ends", minimum=1
    )
    sbatch: tuple[str, ...] = option_field(
        (),
        "further options of sbatch without dashes, such as partition=gpu account=llm exclusive",
        nargs="*",
        metavar="OPTION",
        repeatable=True,
    )
    program: str | None = option_field(
        None,
        "program with the flags of pretrain_gpt.py (default: that of this repository)",
        metavar="FILE",
    )
    template: str | None = option_field(
        None,
        "file whose text from the first empty line on is that of the job's file, such as a copy of "
        "the default that loads modules (default: examples/slurm/pretrain_gpt.sbatch)",
        metavar="FILE",
    )
    print_file: bool = option_field(
        False, "print the job's file instead of writing and submitting it", flag="print"
    )

    @property
    def node_range(self) -> range:
        """The numbers of nodes; empty if the option is none."""
        least, _, most = self.nodes.partition("-")
        if not (least.isdecimal() and (most or least).isdecimal() and int(least)):
            return range(0)
        return range(int(least), int(most or least) + 1)


@dataclass(frozen=True)
class Status(Command):
    """Shows the job of a run, how its attempts have ended, and the progress of the run."""

    run: str = option_field(
        "", "--save folder of the run", metavar="RUN", positional=True, required=True
    )

    def problems(self) -> Iterator[Problem]:
        yield from run_problems("run", [self.run] if self.run else [], may_start=True)


@dataclass(frozen=True)
class Tail(Status):
    """Follows the output of a run's job until the job or Ctrl-C ends it."""

    lines: int = option_field(20, "number of lines to begin with", minimum=0)


@dataclass(frozen=True)
class Restart(Command):
    """Queues a job again, if its run is to continue; the job's file calls it when the run ends.

    Accepts all flags of the run. The exit status is the run's.
    """

    status: int = option_field(
        0, "exit status of the run", metavar="STATUS", positional=True, required=True
    )
    job: str = option_field("", "number of the job", required=True)


def submit(options: Submit, training: Sequence[str]) -> None:
    run = Path(options.run)
    if not training and (run / yaml_file.FILE_NAME).is_file():
        training = ["--config", str(run / yaml_file.FILE_NAME)]
    problems = list(_job_problems(options))
    flags, counts, of_run = _check_run(options, training)
    if problems := [*problems, *of_run]:
        raise UserError(*problems)
    text = job_file(options, counts, flags)
    if options.print_file:
        print(text, end="")
        return
    run.mkdir(parents=True, exist_ok=True)
    (run / FILE).write_text(text, encoding="utf-8")
    job = _slurm("sbatch", "--parsable", run / FILE).strip().partition(";")[0]
    _record(run, event="submit", job=job)
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
    job = _last_job(Path(options.run))
    if shutil.which("sbatch") is None:
        yield Problem("slurm-missing", program="sbatch")
    elif job is not None and (state := _job_fields(job).get("JobState")) in ALIVE:
        yield Problem("slurm-job-is-alive", "run", job=job, state=state)


def seconds_of(limit: str) -> int | None:
    """Seconds of a time limit as sbatch reads it; None if it is none."""
    match = TIME.fullmatch(limit)
    if match is None:
        return None
    days, *parts = match.groups()
    values = [int(part) for part in parts if part is not None]
    if days is None and len(values) < 3:
        values = [0, *values]  # minutes, or minutes and seconds
    hours, minutes, seconds = (*values, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check_run(
    options: Submit, training: Sequence[str]
) -> tuple[list[str], list[int], list[Problem]]:
    """Flags of the run, the numbers of nodes on which it can train, and why it cannot."""
    flags, show = list(training), partial(print_warning, table=table_of(Submit))
    config, _ = arguments.build_config(flags, world_size=1, warn=_ignore)
    problems = []
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is None:
        flags += ["--save", options.run]
    elif not is_same_path(save, options.run):
        problems.append(Problem("slurm-save-elsewhere", value=save, run=options.run))
    if load is None:
        flags += ["--load", options.run]
    elif not is_same_path(load, options.run):
        problems.append(Problem("slurm-load-elsewhere", value=load, run=options.run))
    usable, reasons = [], dict[int, list[Problem]]()
    for count in reversed(options.node_range or range(1, 2)):
        size = count * options.ranks_per_node
        is_most = count == max(options.node_range, default=1)
        _, reasons[count] = arguments.build_config(
            flags, world_size=size, warn=show if is_most else _ignore, complete=_complete
        )
        if not reasons[count]:
            usable.append(count)
        elif is_most:
            return flags, [], [*problems, *reasons[count]]
    if options.node_range and (least := options.node_range[0]) not in usable:
        size, reason = least * options.ranks_per_node, reasons[least][0]
        problem = Problem("slurm-nodes-unusable", settings=options, size=size, least=least)
        problems.append(problem.extended(reason.render()))
    return flags, usable, problems


def _ignore(warning: Problem) -> None:
    """Leaves out a warning that another call prints."""


def _complete(
    config: Config, world_size: int, warn: Callable[[Problem], None]
) -> tuple[Config, list[Problem]]:
    """Fills in what the run takes from the checkpoint and the DeepSpeed file."""
    config, _, problems = complete_settings(config, world_size, warn)
    return config, problems


def job_file(options: Submit, counts: Sequence[int], flags: Sequence[str]) -> str:
    """The file for sbatch.

    Args:
        options: The job.
        counts: Numbers of nodes on which the run can train, the largest first.
        flags: Flags of the run.
    """
    run = Path(os.path.abspath(options.run))
    gpus = options.ranks_per_node if options.gpus_per_node is None else options.gpus_per_node
    values = {
        "job-name": run.name,
        "nodes": options.nodes,
        # With a number of tasks, Slurm would not start the job again on fewer nodes.
        "mincpus": options.ranks_per_node * options.cpus_per_rank,
        "gpus-per-node": gpus,
        "time": options.time,
        "signal": f"TERM@{options.signal_seconds}",
        "open-mode": "append",
        "chdir": Path.cwd(),
        "output": str(run / OUTPUT).replace("%", "%%"),
    }
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in values.items() if value]
    variables = {
        "repository": REPOSITORY,
        "python": sys.executable,
        "program": os.path.abspath(options.program or PRETRAIN),
        "ranks": options.ranks_per_node,
        "node_counts": " ".join(map(str, counts)),
    }
    again = f"sbatch {shlex.quote(str(run / FILE))}"
    words = "".join(
        f"{NEXT_LINE if word.startswith('--') else ' '}{shlex.quote(word)}" for word in flags
    )
    comments = [again, *lines, "requeue", *options.sbatch]
    if broken := [line for line in comments if re.search(r"[\x00-\x1f\x7f]", line)]:
        raise user_error("job-file-control-character", text=repr(broken[0]))
    return "".join(
        [
            "#!/bin/bash\n",
            f"# Written by tools/slurm.py submit; once more: {again}\n",
            *(f"#SBATCH --{line}\n" for line in comments[1:]),
            "\n",
            *(f"{name}={shlex.quote(str(value))}\n" for name, value in variables.items()),
            f"set --{words}\n\n",
            Path(options.template or TEMPLATE).read_text(encoding="utf-8").partition("\n\n")[2],
        ]
    )


def restart(options: Restart, training: Sequence[str]) -> int:
    config, _ = arguments.build_config(training, world_size=1, warn=_ignore)
    save, where = config.checkpoint.save, ""
    if save is not None and not is_url(save):
        iteration = _progress(Path(save))
        where = f" at iteration {iteration}"
        reason = _reason_to_end(options, Path(save), iteration)
        ended = {"status": options.status, "iteration": iteration}
        with suppress(OSError):  # a full disk; the job is queued again all the same
            _record(Path(save), event="end", job=options.job, **ended)
    elif save is not None and options.status == ExitCode.TERMINATED:
        reason = ""  # the signal of the time limit, after which nothing needs to be known
    else:
        reason = "there is no --save folder that tells whether another attempt would help"
    outcome = f"the job ends: {reason}" if reason else "the job is queued again"
    print(f"{PROGRAM}: the run ended with status {options.status}{where}; {outcome}", flush=True)
    if not reason:
        _slurm("scontrol", "requeue", options.job)
    return options.status


def _progress(run: Path) -> int:
    """Iteration of the newest checkpoint, or from which the run has started since."""
    follower = Follower(run)
    follower.poll()
    known = [item for item in follower.history.events if item["event"] in ("start", "checkpoint")]
    return int(known[-1]["iteration"]) if known else max(follower.history.checkpoints, default=0)


def _reason_to_end(options: Restart, run: Path, iteration: int) -> str:
    """Returns the reason that a job is not queued again; "" if it is."""
    if options.status in ENDS:
        return "another attempt would not change that" if options.status else "the run is complete"
    ends = [item for item in _records(run) if item["event"] == "end" and item["job"] == options.job]
    before = [item["iteration"] for item in ends[1 - FUTILE :]]
    if len(before) == FUTILE - 1 and {*before} == {iteration}:
        return f"{FUTILE} attempts in a row left no newer checkpoint"
    state = _job_fields(options.job).get("JobState")
    return "" if state in ("RUNNING", None) else f"it is {state}"  # such as cancelled


def status(options: Status, _: Sequence[str]) -> None:
    from rich.console import Console

    run = Path(options.run)
    job = _require_job(run)
    fields = _job_fields(job)
    if fields:
        where = f" on {fields['NodeList']}" if fields["JobState"] == "RUNNING" else ""
        where = where or (f" ({fields['Reason']})" if fields["JobState"] == "PENDING" else "")
        restarts, used, limit = (fields[key] for key in ("Restarts", "RunTime", "TimeLimit"))
        print(f"job {job}: {fields['JobState']}{where}, {used} of {limit}, {restarts} restarts")
    else:
        print(f"job {job}: Slurm does not know it any more")
    for item in _records(run):
        if item["event"] == "end" and item["job"] == job:
            print(f"  attempt ended with status {item['status']} at iteration {item['iteration']}")
    follower, console = Follower(run), Console(highlight=False)
    follower.poll()
    console.print(frame(run.resolve().name, follower, console.width, has_dots=False))


def tail(options: Tail, _: Sequence[str]) -> None:
    run = Path(options.run)
    job, path, offset = _require_job(run), run / OUTPUT, 0
    for poll in itertools.count():
        is_alive = poll % (STATE_S / POLL_S) or _job_fields(job).get("JobState") in ALIVE
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                text = b"".join(deque(file, None if poll else options.lines))
                offset = file.tell()
            print(text.decode(errors="replace"), end="", flush=True)
        if not is_alive:
            return
        time.sleep(POLL_S)


def _slurm(*words: object) -> str:
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


def _job_fields(job: str) -> dict[str, str]:
    """Returns Slurm's fields of a job; empty if there are none."""
    try:
        shown = _slurm("scontrol", "show", "job", "-o", job)
    except UserError as error:
        if error.problems[0].code == "slurm-missing":
            raise
        return {}
    return dict(re.findall(r"(\w+)=(\S*)", shown))


def _record(run: Path, **values: Any) -> None:
    path = run / RECORD
    end = path.read_bytes()[-1:] if path.is_file() else b""
    with path.open("a", encoding="utf-8") as file:
        # A write to a full disk may have left a part of a line.
        separator = "" if end in (b"", b"\n") else "\n"
        file.write(separator + json.dumps({**values, "time": round(time.time(), 3)}) + "\n")


def _records(run: Path) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    with suppress(FileNotFoundError):
        RecordFile(run / RECORD, records.append, records.clear, skip_damaged=True).read()
    return records


def _last_job(run: Path) -> str | None:
    jobs = [str(record["job"]) for record in _records(run)]
    return jobs[-1] if jobs else None


def _require_job(run: Path) -> str:
    job = _last_job(run)
    if job is None:
        raise user_error("slurm-no-job", "run", run=run)
    return job


COMMANDS: Commands = {
    "submit": (Submit, submit),
    "status": (Status, status),
    "tail": (Tail, tail),
    "restart": (Restart, restart),
}


def main(argv: Sequence[str]) -> int:
    return run_command(PROGRAM, COMMANDS, argv, with_training=("submit", "restart"))


if __name__ == "__main__":
    start_tool.run(main)
