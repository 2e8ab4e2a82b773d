"""Starts a program of this folder: finds the package, and checks the environment.

Imported first, as the first lines of every program state; works with Python 3.8 or newer. A folder
with further programs has a link to it.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))

from collections.abc import Callable, Sequence

from megatron_ds.launch.process import program_start

program_start.begin()


def run(main: Callable[[Sequence[str]], int | None]) -> None:
    """Runs the program with its arguments, and exits with its status."""
    sys.exit(main(sys.argv[1:]))
