"""Check a run: replay recorded steps as one process on a CPU, and compare them with its records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cli.command import fail, table_of
from megatron_ds.config import Config
from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.options.checkpoint import missing_folder
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.training.replay.one_process import start_replay, trust_of
from megatron_ds.training.replay.verification import verify


@dataclass(frozen=True)
class Options:
    """Checks a run that has records of --record-every: replays recorded steps from the checkpoint
    before them, as one process on a CPU, whatever the layout of the run.

    Flags of pretrain_gpt.py replace settings of the run: data and tokenizer are read where
    --data-path and the tokenizer's flags say, or with --trust-recorded-files where the run says.
    Exit status 0: all steps are equal; 1: the first difference is printed; 2: the steps cannot be
    replayed.
    """

    PROGRAM: ClassVar[str] = "verify_run.py"

    PEERS: ClassVar[str] = "pretrain_gpt"

    run: str = option_field("", metavar="RUN", positional=True, required=True)
    """--save folder of the run."""
    steps: tuple[str, ...] | None = option_field(None, nargs="*", metavar="STEPS")
    """Steps to check, such as 3 or 10-20 (default: all recorded ones)."""
    tolerance: float | None = option_field(None, above=0)
    """Largest accepted difference relative to a norm (default: docs/running/verifying.md)."""
    script: str | None = option_field(None, metavar="FILE")
    """Program that trained the run (default: pretrain_gpt.py)."""
    trust_recorded_files: bool = option_field(False)
    """Read the files outside of the run's folder that its record names."""
    show_logs: bool = option_field(False)
    """Print the logs of the replays."""
    training: Config = option_group(Config(), hidden=True)
    given: frozenset[str] = frozenset()

    def problems(self) -> Iterator[Problem]:
        for problem in missing_folder(self.run):
            yield problem.about(load="run")
        if self.script is not None:
            yield from file_problems("script", self.script)


def work(options: Options) -> int:
    limit = options.tolerance
    run = Path(options.run)
    program = [] if options.script is None else [options.script]
    replay = partial(start_replay, program, options.show_logs)
    try:
        return verify(run, options.steps, replay, print, tolerance=limit, trust=trust_of(options))
    except UserError as error:  # with another status than a difference
        fail(error.problems, table_of(Options))


main = cli.program(Options, work)
