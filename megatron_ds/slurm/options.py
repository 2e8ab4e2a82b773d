"""Options of the commands of tools/slurm.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.cli.subcommands import Command
from megatron_ds.config.fields import UNSET_INT, option_field
from megatron_ds.config.problems import Problem
from megatron_ds.reports.history import run_problems

PROGRAM = "slurm.py"


@dataclass(frozen=True)
class Submit(Command, program=PROGRAM):
    """Writes RUN/slurm.sbatch, and submits it: a job that trains until the run is complete.

    Before its time limit the run saves, and the job is queued again; so it is after the loss of a
    node or rank, and after a hang. It ends when the run is complete or has an error, and when three
    attempts in a row leave the same newest checkpoint.

        python tools/slurm.py submit runs/first --nodes 4 --ranks-per-node 8 --time 8:00:00 \\
            --config run.yaml

    Accepts all flags of pretrain_gpt.py; --save and --load are RUN. Without any, the settings are
    from RUN/config.yaml. `sbatch RUN/slurm.sbatch` submits the job again.
    """

    run: str = option_field("", metavar="RUN", positional=True, required=True)
    """--save folder of the run."""
    nodes: str = option_field("1", metavar="N[-N]")
    """Number of nodes, or the least and the most, such as 2-4: the job continues on the nodes that
    are left."""
    ranks_per_node: int = option_field(UNSET_INT, required=True, minimum=1)
    """Number of processes per node."""
    gpus_per_node: int | None = option_field(None, minimum=0)
    """Number of GPUs per node (default: --ranks-per-node); 0 requests none."""
    cpus_per_rank: int = option_field(1, minimum=1)
    """Least number of CPUs per process."""
    time: str | None = option_field(None, metavar="TIME")
    """Time limit of an attempt, as of sbatch: MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS and others
    (default: the partition's)."""
    signal_seconds: int = option_field(120, minimum=1)
    """Seconds before the time limit at which the run saves and ends."""
    sbatch: tuple[str, ...] = option_field((), nargs="*", metavar="OPTION", repeatable=True)
    """Further options of sbatch without dashes, such as partition=gpu account=llm exclusive."""
    program: str | None = option_field(None, metavar="FILE")
    """Program with the flags of pretrain_gpt.py (default: that of this repository)."""
    template: str | None = option_field(None, metavar="FILE")
    """File whose text from the first empty line on is that of the job's file, such as a copy of the
    default that loads modules (default: examples/slurm/pretrain_gpt.sbatch)."""
    print_file: bool = option_field(False, flag="print")
    """Print the job's file instead of writing and submitting it."""

    @property
    def node_range(self) -> range:
        """The numbers of nodes; empty if `nodes` is not a number or a range."""
        least, _, most = self.nodes.partition("-")
        if not (least.isdecimal() and (most or least).isdecimal() and int(least)):
            return range(0)
        return range(int(least), int(most or least) + 1)


@dataclass(frozen=True)
class Status(Command, program=PROGRAM):
    """Shows the job of a run, how its attempts have ended, and the progress of the run."""

    run: str = option_field("", metavar="RUN", positional=True, required=True)
    """--save folder of the run."""

    def problems(self) -> Iterator[Problem]:
        yield from run_problems("run", [self.run] if self.run else [], may_start=True)


@dataclass(frozen=True)
class Tail(Status, program=PROGRAM):
    """Follows the output of a run's job until the job or Ctrl-C ends it."""

    lines: int = option_field(20, minimum=0)
    """Number of lines to begin with."""


@dataclass(frozen=True)
class Restart(Command, program=PROGRAM):
    """Queues a job again, if its run is to continue; the job's file calls it when the run ends.

    Accepts all flags of the run. The exit status is the run's.
    """

    status: int = option_field(0, metavar="STATUS", positional=True, required=True)
    """Exit status of the run."""
    job: str = option_field("", required=True)
    """Number of the job; of a task of an array ARRAY_TASK."""
