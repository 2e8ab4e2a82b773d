"""The settings of the run that a job starts, for each number of nodes that the job may get."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron_ds.cli import arguments
from megatron_ds.cli.command import print_warning, table_of
from megatron_ds.config import Config
from megatron_ds.config.options.checkpoint import is_same_path
from megatron_ds.config.problems import Problem
from megatron_ds.slurm.options import Submit
from megatron_ds.training.run import complete_settings


def settings_of(training: Sequence[str]) -> Config:
    """The settings that flags give, also if they have problems, which are not reported."""
    config, _ = arguments.build_config(training, world_size=1, warn=_ignore)
    return config


def check_run(
    options: Submit, training: Sequence[str]
) -> tuple[list[str], list[int], list[Problem]]:
    """Flags of the run, the numbers of nodes on which it can train, and why it cannot."""
    flags = list(training)
    show = partial(print_warning, table=table_of(Submit))
    config = settings_of(flags)
    problems = []
    save = config.checkpoint.save
    load = config.checkpoint.load
    if save is None:
        flags += ["--save", options.run]
    elif not is_same_path(save, options.run):
        problems.append(Problem("slurm-save-elsewhere", value=save, run=options.run))
    if load is None:
        flags += ["--load", options.run]
    elif not is_same_path(load, options.run):
        problems.append(Problem("slurm-load-elsewhere", value=load, run=options.run))
    usable = []
    reasons = dict[int, list[Problem]]()
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
        size = least * options.ranks_per_node
        reason = reasons[least][0]
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
