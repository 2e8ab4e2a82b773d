"""The command line of pretrain_gpt.py: arguments in, configuration or every problem out.

Owns the order of the checks and which rank reports. Knows no torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_ds import presets, schedule_validation
from megatron_ds.cli import config_file
from megatron_ds.cli.command import (
    HELP,
    HELP_ALL,
    build,
    fail,
    listing,
    print_warning,
    render,
)
from megatron_ds.cli.config_file import ConfigFiles
from megatron_ds.cli.flags import PROGRAM, FlagTable, training_flags
from megatron_ds.cli.scan import scan
from megatron_ds.config import Config, TokenizerConfig, yaml_file
from megatron_ds.config.problems import Problem
from megatron_ds.launch.exit_codes import SettingsRejected

VERSION = "--version"
FIRST_RANK_TIMEOUT_S = 10.0
"""Seconds within which a launcher terminates this rank after the first rank has failed."""

REPLACED = {"zero0-in-half-precision"}
"""Warnings of values that the run replaces. They are among the problems of a command that has to be
changed anyway."""

Warn = Callable[[Problem], None]
Complete = Callable[[Config, int, Warn], tuple[Config, list[Problem]]]
"""Fills in a configuration from elsewhere, given the number of processes; returns problems."""
Check = Callable[[Config, int, bool, Warn], list[Problem]]
"""Finds problems of machine and files, given the number of processes and whether the settings
themselves have no problems."""

Describe = Callable[[Config], Iterable[str]]
"""Lines on the settings."""


def build_config(
    argv: Sequence[str],
    *,
    world_size: int,
    warn: Warn,
    complete: Complete | None = None,
    check: Check | None = None,
) -> tuple[Config, list[Problem]]:
    """Build the configuration of a command line.

    Args:
        argv: The arguments without the program's name.
        world_size: Number of processes.
        warn: Called with each warning.
        complete: Fills in values from sources other than flags (the DeepSpeed file).
        check: Checks machine and files.

    Returns:
        The configuration and every problem found; without problems the run can start.
    """
    table = training_flags()
    line = scan(argv, table)
    files = config_file.read(line.values.get("config", ()), table)
    if (preset := line.values.get("preset", files.values.get("preset"))) in presets.PRESETS:
        files = _with_preset(preset, line.values)
    if config_file.STAGES in line.values:
        entries = line.values[config_file.STAGES]
        line.values[config_file.STAGES] = config_file.read_stages(entries, table, files)
    for warning in (*line.warnings, *files.warnings):
        warn(warning)
    config: Config = build(Config(), line.implied | files.values | line.values)
    if rows := config.model.pad_vocab_size_to:
        config = config.with_values({"make_vocab_size_divisible_by": rows})
    config = dataclasses.replace(
        config,
        given=frozenset(files.given | line.values.keys()),
        origins={k: v for k, v in files.origins.items() if k not in line.values},
    )
    world_size = config.runtime.dry_run or world_size
    unreadable = line.unreadable | (files.unreadable - line.values.keys())
    problems: list[Problem] = []
    if complete is not None:
        config, problems = complete(config, world_size, warn)
    problems = [
        *problems,
        *config.problems(world_size),
        *schedule_validation.problems(config, config.parallel.data_parallel_size(world_size)),
    ]
    if check is not None and not (config.runtime.print_config or config.runtime.dry_run):
        problems += check(config, world_size, not problems, warn)
    if any(problem.code in config_file.UNREADABLE for problem in files.problems):
        problems = []  # most of them would follow from the settings of the file
    if "preset" in line.unreadable | files.unreadable:
        problems = []  # as well, from the settings of the preset
    sound = [
        config.with_origin(problem)
        for problem in problems
        if unreadable.isdisjoint(problem.mentioned)
    ]
    return config, [*_still_missing((*line.problems, *files.problems), config.given), *sound]


def _still_missing(problems: Iterable[Problem], fields: frozenset[str]) -> Iterator[Problem]:
    """Problems of reading, without what a flag requires if another file has it."""
    for problem in problems:
        if problem.code != "flag-requires-another" or fields.isdisjoint(problem.fields):
            yield problem


def _with_preset(preset: str, values: Mapping[str, Any]) -> ConfigFiles:
    """The settings of a preset, overridden by the files of --config.

    Args:
        values: The settings of the command line.
    """
    path = presets.path_of(preset)
    files = config_file.read((path, *values.get("config", ())), training_flags())
    has_tokenizer = not vars(TokenizerConfig()).keys().isdisjoint(files.given | values.keys())
    if has_tokenizer and files.origins.get("vocab_size", "").startswith(f"set in {path}"):
        del files.values["vocab_size"], files.origins["vocab_size"]
        files.given.remove("vocab_size")
    return files


def parse(
    argv: Sequence[str],
    *,
    world_size: int = 1,
    rank: int = 0,
    complete: Complete | None = None,
    check: Check | None = None,
    describe: Describe | None = None,
    program: str = PROGRAM,
    raises: bool = False,
) -> Config:
    """Read the configuration of a command line; see `build_config`.

    Args:
        rank: Only rank 0 prints.
        describe: Gives lines on the settings, which --print-config prints as comments.
        program: Name for messages.
        raises: Raise the problems instead of printing them, for a message about all hosts.

    Raises:
        SettingsRejected: If there are problems, and `raises`.
        SystemExit: With status 0 after --help, --version or --print-config;
            with status 2 after all problems are printed.
    """
    table = dataclasses.replace(training_flags(), program=program)
    requested = next((word for word in argv if word in (*HELP, VERSION)), None)
    if requested is not None:
        if rank == 0:
            _print_about(table, requested, every_flag=HELP_ALL in argv)
        raise SystemExit(0)

    replaced: list[Problem] = []

    def warn(warning: Problem) -> None:
        if warning.code in REPLACED:
            replaced.append(warning)
        elif rank == 0:
            print_warning(warning, table)

    config, problems = build_config(
        argv, world_size=world_size, warn=warn, complete=complete, check=check
    )
    problems = [*problems, *(replaced if problems else ())]
    if problems and raises:
        rendered = [render(problem, table) for problem in problems]
        raise SettingsRejected(listing(problems, table), rendered)
    for warning in () if problems or rank else replaced:
        print_warning(warning, table)
    if problems:
        reports = rank == 0 or _first_rank_is_silent()
        fail(problems, table, rank=0 if reports else rank)
    if config.runtime.print_config:
        if rank == 0:
            print(yaml_file.dump(config), end="")
            for line in () if describe is None else describe(config):
                print(f"# {line}")
        raise SystemExit(0)
    return config


def _print_about(table: FlagTable, requested: str, *, every_flag: bool) -> None:
    """Prints the versions or the help."""
    # Imported by the few commands that need them: the others start faster.
    from megatron_ds.cli.help import training_help
    from megatron_ds.launch.software import version_text

    print(version_text() if requested == VERSION else training_help(table, every_flag=every_flag))


def _first_rank_is_silent() -> bool:
    """Whether the first rank did not report the problems that another one has found.

    A launcher terminates all ranks when one of them exits: the one that reports must exit first.
    """
    from megatron_ds.launch.watch.liveness import find_launchers

    if not find_launchers():
        return False
    try:
        time.sleep(FIRST_RANK_TIMEOUT_S)
    except SystemExit:  # the launcher's signal
        return False
    return True
