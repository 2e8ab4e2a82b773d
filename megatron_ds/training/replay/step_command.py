"""Check the steps between two checkpoints of any trainer, by computing them again."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cli.command import fail, table_of
from megatron_ds.config import Config
from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import exclusive_problem, option_field, option_group
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.conversion.inspect.options import folder_problems
from megatron_ds.launch.output import print_error
from megatron_ds.training.replay.one_process import start_replay, trust_of

SAMPLES = ("-m", "megatron_ds.training.replay.given_samples")
"""Program that computes the steps on given samples."""


@dataclass(frozen=True)
class Options:
    """Checks the steps between two checkpoints of a run, of this program or another one: computes
    them again as one process on a CPU, and compares weights and states of Adam.

    Flags of pretrain_gpt.py, or --config, give the settings of the run and its data; a checkpoint
    of this program has its settings, which flags replace. Exit status 0: the result is equal; 1:
    the first tensor that differs is printed, with the likely kind of mistake; 2: the steps cannot
    be computed.
    """

    PROGRAM: ClassVar[str] = "check_step.py"

    PEERS: ClassVar[str] = "pretrain_gpt"

    first: str = option_field("", metavar="FIRST", positional=True, required=True)
    """Folder of the checkpoint before the steps; torchtitan:FOLDER names its format."""
    second: str = option_field("", metavar="SECOND", positional=True, required=True)
    """Folder of the checkpoint after them."""
    tolerance: float | None = option_field(None, above=0)
    """Largest accepted difference relative to a norm (default: docs/running/second_opinion.md)."""
    script: str | None = option_field(None, metavar="FILE")
    """Program that computes the steps (default: pretrain_gpt.py)."""
    samples: str | None = option_field(None, metavar="FILE")
    """Ids of the samples of the steps, in the order in which the run read them: an .npy file of
    [samples, --seq-length + 1]; instead of --data-path, for checkpoints of other programs."""
    trust_recorded_files: bool = option_field(False)
    """Read the files outside of the run's folder that its record names."""
    show_logs: bool = option_field(False)
    """Print the logs of the computations."""
    training: Config = option_group(Config(), hidden=True)
    given: frozenset[str] = frozenset()

    def problems(self) -> Iterator[Problem]:
        yield from folder_problems("first", self.first)
        yield from folder_problems("second", self.second)
        for name in ("script", "samples"):
            if (file := getattr(self, name)) is not None:
                yield from file_problems(name, file)
        if self.script is not None and self.samples is not None:
            yield exclusive_problem("script", "samples")


def work(options: Options) -> int:
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints a warning
        from megatron_ds.training.replay.check_step import check_step, open_pair  # takes seconds

    trust = trust_of(options)
    samples = None if options.samples is None else Path(options.samples)
    program = [] if options.script is None else [options.script]
    replay = partial(start_replay, program if samples is None else SAMPLES, options.show_logs)
    settings = dataclasses.replace(options.training, given=options.given)
    try:
        pair_of = options.first, options.second
        with open_pair(*pair_of, settings, trust, print_error, samples) as pair:
            return check_step(pair, replay, print, trust=trust, tolerance=options.tolerance)
    except UserError as error:  # with another status than a difference
        fail(error.problems, table_of(Options))


main = cli.program(Options, work)
