"""Fork a run: start one of its own from a checkpoint, with another schedule, as for a decay."""

from __future__ import annotations

from megatron_ds import cli
from megatron_ds.launch.output import print_error
from megatron_ds.loading.fork import Options, fork


def work(options: Options) -> None:
    command = fork(options, lambda problem: print_error(f"WARNING: {problem.render()}"))
    print(f"wrote {options.save}, a fork of {options.run} at iteration {options.at}; start it by")
    print(f"    {command}")


main = cli.program(Options, work)
