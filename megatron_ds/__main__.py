"""Runs a program of the package by its name.

`python -m megatron_ds NAME ...`, and `megatron-ds NAME ...` where the package is installed. With
--num-gpus N, as several ranks on this machine.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from megatron_ds.launch.process import program_start
from megatron_ds.programs import CONSOLE, PROGRAMS, summary
from megatron_ds.version import VERSION


def main(argv: Sequence[str] | None = None) -> int | None:
    """Runs the program that the first argument names; returns its exit status.

    Args:
        argv: The arguments. None: the command line's.
    """
    program_start.begin()
    from megatron_ds.cli.command import HELP  # needs the packages that `begin` looks for
    from megatron_ds.cli.subcommands import report_unknown

    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in HELP:
        print(overview())
        return 0
    if words[0] == "--version":
        print(f"{CONSOLE} {VERSION}")
        return 0
    name, *arguments = words
    if name not in PROGRAMS:
        return report_unknown(CONSOLE, name, PROGRAMS)
    program = PROGRAMS[name]
    if program.has_ranks and not any(word in HELP for word in arguments):
        arguments = _start_ranks(name, arguments)
    status: int | None = importlib.import_module(program.module).main(arguments)
    return status


def _start_ranks(name: str, arguments: Sequence[str]) -> list[str]:
    """Becomes the launcher of several ranks, if their number is given; returns the arguments."""
    from megatron_ds.config.problems import UserError
    from megatron_ds.launch import local_ranks
    from megatron_ds.launch.exit_codes import ExitCode

    try:
        count, rest = local_ranks.take_count(arguments)
    except UserError as error:
        texts = [problem.render() for problem in error.problems]
        print(f"{CONSOLE} {name}: error: {'; '.join(texts)}", file=sys.stderr)
        raise SystemExit(int(ExitCode.BAD_SETTINGS)) from None
    if count is not None:
        local_ranks.become(local_ranks.command(count, ["megatron_ds", name, *rest]))
    return rest


def overview() -> str:
    """All programs, each with the first sentence of its module."""
    lines = [
        f"usage: {CONSOLE} PROGRAM ... ({CONSOLE} PROGRAM --help explains it)",
        f"{' or '.join(n for n, program in PROGRAMS.items() if program.has_ranks)}: "
        "--num-gpus N starts N processes on this machine",
        "",
    ]
    width = 2 + max(map(len, PROGRAMS))
    lines += [f"  {name:<{width}}{summary(name)}" for name in PROGRAMS]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
