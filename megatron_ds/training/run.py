"""The program of a run: reads the settings, checks them, builds the run and trains.

Owns the order of these. Imports no torch before the settings are right.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ds.cli import arguments
from megatron_ds.cli.arguments import Warn
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.launch import environment
from megatron_ds.launch.process import rank_log
from megatron_ds.launch.process.lifecycle import ProcessLifecycle, process_lifecycle
from megatron_ds.launch.startup_timer import StartupTimer
from megatron_ds.loading.plan import LoadPlan, continue_schedule, make_plan
from megatron_ds.planning.settings import without_tokenizer
from megatron_ds.training.extensions import Extensions
from megatron_ds.training.run_record import RunRecord

if TYPE_CHECKING:
    from megatron_ds.launch.ranks.roll_call import RollCall
    from megatron_ds.training.start.preflight import RunInputs


def pretrain(extensions: Extensions, argv: Sequence[str] | None = None) -> RunRecord:
    """Runs one process of a training: reads the settings, checks them, builds the run and trains.

    Every process of the run calls it, once, as its last work.

    Args:
        extensions: Parts of the run in addition to, or instead of, the package's own.
        argv: Flags of pretrain_gpt.py. None: the command line's.

    Returns:
        The steps, losses and evaluations, and the newest checkpoint.

    Raises:
        SystemExit: If the run does not finish; docs/running/stopping_and_failures.md lists the
            statuses.
    """
    with process_lifecycle() as life:
        record = run(extensions, sys.argv[1:] if argv is None else argv, life)
    if record.status:
        sys.exit(record.status)
    return record


def run(
    extensions: Extensions,
    words: Sequence[str],
    life: ProcessLifecycle,
    *,
    is_guest: bool = False,
) -> RunRecord:
    """Runs one process of a training; see `pretrain`.

    Args:
        extensions: Parts of the run.
        words: Flags of pretrain_gpt.py.
        life: Handles signals and the loss of other processes.
        is_guest: The run is inside of a program that goes on afterwards, for which problems of the
            settings are raised instead of printed.

    Raises:
        SettingsRejected: If there are such problems, and `is_guest`.
    """
    startup = StartupTimer(is_guest=is_guest)
    environment.adopt_ranks()
    environment.prepare_environment()  # before the checks import libraries
    config, inputs = _read_settings(words, extensions, life.roll_call, raises=is_guest)
    if config.runtime.dry_run is not None:
        if environment.rank() == 0:
            from megatron_ds.planning import plan_report  # imports torch

            plan_report.print_plan(config, config.runtime.dry_run)
        return RunRecord()
    assert inputs is not None
    rank_log.open_log(config.logging.log_dir)
    _describe(life.roll_call, config, inputs.plan, inputs)
    startup.mark("settings")
    from megatron_ds.training import process  # torch takes seconds to import

    startup.mark("libraries")
    return process.train(config, inputs, extensions, life, startup)


def main(argv: Sequence[str]) -> None:
    """pretrain_gpt.py: a run without parts of another program."""
    pretrain(Extensions(), argv)


def _read_settings(
    words: Sequence[str], extensions: Extensions, roll_call: RollCall, *, raises: bool = False
) -> tuple[Config, RunInputs | None]:
    """Reads and checks the settings and what they name.

    Args:
        words: The flags.
        extensions: Parts of the program.
        roll_call: Roll call of this process, which describes the settings there if it finds
            problems.
        raises: Raise problems instead of printing them, as a run on several hosts does.
    """
    plans: list[LoadPlan] = []
    opened: list[RunInputs | None] = []

    def complete(config: Config, size: int, warn: Warn) -> tuple[Config, list[Problem]]:
        """Fills in the settings of the checkpoint to load and of the DeepSpeed file."""
        config = dataclasses.replace(config, custom_parts=extensions.custom_parts())
        config, plan, problems = complete_settings(config, size, warn)
        if config.runtime.dry_run is not None:
            config = without_tokenizer(config)
        plans.append(plan)
        return config, problems

    def check(config: Config, size: int, is_sound: bool, warn: Warn) -> list[Problem]:
        """Checks files and machine; imported here, after --help has been answered."""
        from megatron_ds.training.start import preflight

        problems, inputs = preflight.check(config, plans[0], size, is_sound, warn)
        opened.append(inputs)
        problems = [*extensions.problems(), *problems]
        if problems:
            _describe(roll_call, config, plans[0], None)
        return problems

    config = arguments.parse(
        words,
        world_size=environment.world_size(),
        rank=environment.local_rank(),  # a file may be missing on one machine only
        complete=complete,
        check=check,
        describe=_transfer_lines,
        raises=raises or environment.spans_hosts(),
    )
    return config, next(iter(opened), None)


def _transfer_lines(config: Config) -> list[str]:
    """The table of muP; imported here, because --help does not need the model."""
    from megatron_ds.model.declaration.transfer_table import transfer_lines

    return transfer_lines(config)


def complete_settings(
    config: Config, world_size: int, warn: Warn
) -> tuple[Config, LoadPlan, list[Problem]]:
    """Fills in the settings of the checkpoint to load and of the DeepSpeed file.

    Args:
        config: Configuration of the command line.
        world_size: Number of processes.
        warn: Called for each given option that is replaced.

    Returns:
        The configuration, what it loads, and why either is impossible.
    """
    config, plan, problems = make_plan(config, world_size, warn)
    config, file_problems = merge_file(config, world_size, warn)
    if config.data.train_data_exact_num_epochs is not None:
        from megatron_ds.training.start.data_length import with_exact_epochs

        config, length_problems = with_exact_epochs(config)
        problems += length_problems
    config, plan, schedule_problems = continue_schedule(config, plan, world_size, warn)
    return config, plan, [*problems, *file_problems, *schedule_problems]


def _describe(
    roll_call: RollCall, config: Config, plan: LoadPlan, inputs: RunInputs | None
) -> None:
    from megatron_ds.training.start import rank_settings

    rank_settings.describe(roll_call, config, plan, inputs)
