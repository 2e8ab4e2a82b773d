"""Check a run: replay recorded steps as one process on a CPU, and compare them with its records."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cli.command import fail, table_of
from megatron_ds.config import Config
from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.options.checkpoint import missing_folder
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.engine.ds_config.fields import field_value
from megatron_ds.launch.ranks.rank_variables import RANK_VARIABLES
from megatron_ds.training.verification import verify

PRETRAIN = Path(__file__).resolve().parent.parent / "pretrain_gpt.py"
LAUNCHER = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Options:
    """Checks a run that has records of --record-every: replays recorded steps from the checkpoint
    before them, as one process on a CPU, whatever the layout of the run.

    Flags of pretrain_gpt.py replace settings of the run, such as --data-path where the data is
    elsewhere. Exit status 0: all steps are equal; 1: the first difference is printed; 2: the steps
    cannot be replayed.
    """

    PEERS: ClassVar[str] = "pretrain_gpt"

    run: str = option_field(
        "", "--save folder of the run", metavar="RUN", positional=True, required=True
    )
    steps: tuple[str, ...] | None = option_field(
        None,
        "steps to check, such as 3 or 10-20 (default: all recorded ones)",
        nargs="*",
        metavar="STEPS",
    )
    tolerance: float | None = option_field(
        None,
        "largest accepted difference relative to a norm (default: docs/running/verifying.md)",
        above=0,
    )
    script: str | None = option_field(
        None, "program that trained the run (default: pretrain_gpt.py)", metavar="FILE"
    )
    training: Config = option_group(Config(), hidden=True)
    given: frozenset[str] = frozenset()

    def problems(self) -> Iterator[Problem]:
        for problem in missing_folder(self.run):
            yield problem.about(load="run")
        if self.script is not None:
            yield from file_problems("script", self.script)

    @property
    def changes(self) -> frozenset[str]:
        """The fields that flags of pretrain_gpt.py set."""
        return self.given - {"run", "steps", "tolerance", "script"}


def work(options: Options) -> int:
    def replay(words: Sequence[str]) -> int:
        program = [sys.executable, options.script or str(PRETRAIN), *words]
        unset = [word for name in LAUNCHER for word in ("-u", name)]
        return subprocess.call(["env", *unset, "DS_ACCELERATOR=cpu", *program], stdout=sys.stderr)

    changes = {name: field_value(options.training, name) for name in options.changes}
    limit, run = options.tolerance, Path(options.run)
    try:
        return verify(run, options.steps, replay, print, tolerance=limit, changes=changes)
    except UserError as error:  # with another status than a difference
        fail(error.problems, table_of(Options))


main = cli.program(Options, work)

if __name__ == "__main__":
    start_tool.run(main)
