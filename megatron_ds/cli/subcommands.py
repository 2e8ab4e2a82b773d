"""A tool with several commands, each with options of its own.

Owns the choice of the command; how each is run is in `command.py`. Knows no torch.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

from megatron_ds.cli.command import HELP, fail, run, table_of
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.programs import shown_name


class Command:
    """Base of the options of a command, which is called like the class.

    A subclass names its tool: `class Status(Command, program="slurm.py")`.
    """

    PROGRAM: ClassVar[str]

    def __init_subclass__(cls, *, program: str) -> None:
        cls.PROGRAM = f"{program} {cls.__name__.lower()}"


Commands = Mapping[str, tuple[type, Callable[[Any, Sequence[str]], int | None]]]
"""Options class and function of each command, by name. The function receives the options and the
flags of pretrain_gpt.py, and returns an exit status as the main function of a tool does. Errors of
the user are reported as errors of the settings."""


def run_command(
    program: str,
    commands: Commands,
    argv: Sequence[str],
    *,
    with_training: Collection[str],
    default: str = "",
) -> int:
    """Run a command of a tool and return its exit status.

    Args:
        program: The tool.
        commands: Its commands.
        argv: The arguments without the program's name; the command is the first one.
        with_training: The commands that take the flags of pretrain_gpt.py.
        default: The command that may be left out.
    """
    tables = {name: table_of(options) for name, (options, _) in commands.items()}
    name, rest = (argv[0], argv[1:]) if argv else (HELP[0], ())
    if name in HELP:
        print(_overview(program, commands))
        return ExitCode.FINISHED
    if name.startswith("-") and default:
        name = default
        rest = argv
    if name not in commands:
        return report_unknown(program, name, commands)
    options, work = commands[name]
    training: list[str] = []

    def checked(values: Any) -> int | None:
        try:
            return work(values, training)
        except UserError as error:
            fail(error.problems, tables[name])

    return run(options, checked, rest, training if name in with_training else None)


def report_unknown(program: str, name: str, commands: Collection[str]) -> int:
    """Print that a program has no such command, and return the exit status."""
    near = difflib.get_close_matches(name, list(commands), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    valid = ", ".join(commands)
    problem = Problem("unknown-command", command=name, hint=hint, valid=valid)
    print(f"{shown_name(program)}: error:\n{problem.render()}", file=sys.stderr)
    return ExitCode.BAD_SETTINGS


def _overview(program: str, commands: Commands) -> str:
    lines = [f"usage: {shown_name(program)} COMMAND ... (COMMAND --help explains it)", ""]
    for name, (options, _) in commands.items():
        summary = " ".join((options.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"  {name:<10}{summary}")
    return "\n".join(lines)
