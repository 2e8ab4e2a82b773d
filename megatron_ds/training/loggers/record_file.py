"""Lets a run continue a text file with one record per line. Imports no torch."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_ds.config.problems import Problem
from megatron_ds.fileio.atomic import atomic_write


def continue_file(
    path: Path, iteration: int, keep: Callable[[str], bool], warn: Callable[[str], object]
) -> None:
    """Prepares a file to which a run appends its records.

    A run that starts from 0 renames an existing file to `<path>.1`, or to the next free number.
    Another one removes later records and an incomplete last line, atomically; after any other
    damage the original is kept under such a name, too. A device or a named pipe is left alone.

    Args:
        path: The file.
        iteration: Iteration from which the run starts.
        keep: Whether a line, which ends with a newline, is one of the records up to `iteration`.
            Raises ValueError, TypeError, KeyError, OverflowError or RecursionError if the line is
            not a record.
        warn: Prints a line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        return
    if iteration == 0:
        os.replace(path, free_name(path))
        return
    damaged = 0
    with path.open(encoding="utf-8", errors="replace") as lines, atomic_write(path) as file:
        for line_number, line in enumerate(lines, start=1):
            complete = line.rstrip("\n") + "\n"
            try:
                is_kept = keep(complete)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                if line.endswith("\n"):
                    damaged = damaged or line_number
                continue
            if is_kept:
                file.write(complete.encode())
        if damaged:
            kept = shutil.copyfile(path, free_name(path))
            warning = Problem("metrics-file-damaged", path=path, number=damaged, kept=kept)
            warn(f"WARNING: {warning.render()}")


def free_name(path: Path) -> Path:
    """The first of PATH.1, PATH.2, ... that does not exist."""
    numbered = (path.with_name(f"{path.name}.{index}") for index in itertools.count(1))
    return next(new for new in numbered if not new.exists())
