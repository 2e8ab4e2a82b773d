"""Runs a program of the package by its name.

`python -m megatron_ds NAME ...`, and `megatron-ds NAME ...` where the package is installed.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence

from megatron_ds.launch.process import program_start
from megatron_ds.programs import CONSOLE, PACKAGE, PROGRAMS


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
    name = words[0]
    if name not in PROGRAMS:
        return report_unknown(CONSOLE, name, PROGRAMS)
    status: int | None = importlib.import_module(PROGRAMS[name].module).main(words[1:])
    return status


def overview() -> str:
    """All programs, each with the first sentence of its module, which is not imported."""
    lines = [f"usage: {CONSOLE} PROGRAM ... ({CONSOLE} PROGRAM --help explains it)", ""]
    width = 2 + max(map(len, PROGRAMS))
    for name, program in PROGRAMS.items():
        path = PACKAGE.joinpath(*program.module.split(".")[1:]).with_suffix(".py")
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sentence = " ".join(docstring.split("\n\n")[0].split())
        lines.append(f"  {name:<{width}}{sentence}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
