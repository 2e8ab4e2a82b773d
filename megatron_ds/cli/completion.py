"""Shell completion of flags, for bash and zsh, also behind a launcher.

The completion of a program is made by shtab from its flag table. A launcher or an interpreter is
given a function that looks for such a program among its arguments. Knows no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Mapping
from types import MappingProxyType

from megatron_ds.cli.flags import Flag, FlagTable, training_flags
from megatron_ds.config.data_files import read_text

LAUNCHERS = "deepspeed torchrun python python3 srun"
FILES = {"FILE", "PATH", "PREFIX", "CHECKPOINT_DIR", "DIR", "FOLDER", "OUTPUT_DIR"}
"""What values are called that may be files; a prefix is the beginning of a file's name."""
EXPLANATION = 90
"""Largest number of characters of a flag's explanation."""
SHELLS = ("bash", "zsh")
"""For each, `behind_launcher` has a function for launchers."""


def completion(
    table: FlagTable, shell: str, commands: Mapping[str, FlagTable] = MappingProxyType({})
) -> str:
    """The code that completes the flags of a program, and those of its commands.

    Args:
        table: Flags of the program.
        shell: One of `SHELLS`.
        commands: Flags of each command.
    """
    import shtab

    parser = argparse.ArgumentParser(table.program, add_help=False)
    _add_flags(parser, table)
    if commands:
        parsers = parser.add_subparsers()
        for name, own in commands.items():
            # shtab leaves commands without help out.
            _add_flags(parsers.add_parser(name, help=name, add_help=False), own)
    code = shtab.complete(parser, shell)
    wrapper = read_text(__file__, f"behind_launcher.{shell}").replace("LAUNCHERS", LAUNCHERS)
    return f"{code}\n\n{wrapper}"


def with_training_flags(table: FlagTable) -> FlagTable:
    """A program that has the flags of pretrain_gpt.py, too."""
    return dataclasses.replace(table, groups=(*table.groups, *training_flags().groups))


def _add_flags(parser: argparse.ArgumentParser, table: FlagTable) -> None:
    import shtab

    # Of two flags with one name the first counts.
    flags = {flag.label: flag for flag in reversed(table.own)}
    for flag in sorted(flags.values(), key=lambda flag: flag.label):
        action = _add(parser, flag, table.resolve(flag.help))
        if flag.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]


def _add(parser: argparse.ArgumentParser, flag: Flag, text: str) -> argparse.Action:
    # zsh shows the explanation beside the flag.
    text = textwrap.shorten(re.split(r"[.;:] ", text)[0], EXPLANATION).replace("%", "%%")
    if flag.nargs == 0:
        return parser.add_argument(flag.label, action="store_true", help=text)
    choices = (*flag.choices, *flag.synonyms) or None
    nargs = None if flag.nargs == 1 else flag.nargs
    if flag.positional:
        return parser.add_argument(flag.field, nargs=nargs, choices=choices, help=text)
    return parser.add_argument(flag.label, nargs=nargs, choices=choices, help=text)
