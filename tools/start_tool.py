"""Starts a program of this folder: finds the package, and checks the environment.

Imported first, as the first lines of every program state; works with Python 3.8 or newer. A folder
with further programs has a link to it, and so have the programs of other_names.toml.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from collections.abc import Callable, Sequence

from megatron_ds.launch.process import program_start

program_start.begin()


def run(program: Callable[[Sequence[str]], int | None]) -> None:
    """Runs the program with its arguments, and exits with its status."""
    sys.exit(program(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs the program that has the name of this link in another project."""
    import pkgutil

    from megatron_ds import cli
    from megatron_ds.config.data_files import read_table

    names = read_table(os.path.realpath(__file__), "other_names.toml")
    options = pkgutil.resolve_name(names[os.path.basename(__file__)])
    return cli.run(options, options.run, argv)


if __name__ == "__main__":
    run(main)
