"""Commands found in a script, and limits on how much of it is read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ds.config.problems import user_error

MOST_CHARACTERS = 4_000_000
"""Characters of all scripts, files and values that one reading handles."""
MOST_STEPS = 50_000
"""Words and commands that one reading handles, each as often as it is repeated."""
MOST_NESTED = 1000
"""Parentheses and braces within each other."""
LARGEST_FILE = 1_000_000
"""Bytes of a file that is read."""
OF_THE_SYSTEM = ("/dev/", "/proc/", "/sys/")
"""Folders whose files tell about the machine, and may wait when they are read."""


@dataclass
class Reading:
    """Actions of a script.

    Attributes:
        started: The programs with their arguments and places, in order.
        files: Text that is written to a file, by path; None if it is unknown.
        unread: Constructs that were not read, with their places, and how they are taken.
        unset: Variables that nothing sets, with the place of their first use.
        job_options: Options of the Slurm job that the script submits and that starts a program, by
            place of the program.
    """

    started: list[tuple[list[str], str]] = field(default_factory=list)
    files: dict[str, str | None] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    unset: dict[str, str] = field(default_factory=dict)
    job_options: dict[str, Sequence[str]] = field(default_factory=dict)

    def content(self, path: str, beside: str) -> str | None:
        """The text of a file that the script has written, or that exists and is not too large.

        Args:
            path: The file.
            beside: A file in whose folder it may be.
        """
        for file in (path, os.path.join(os.path.dirname(beside), path)):
            if path not in self.files and os.path.isfile(file):
                return text_of_file(file)
        return self.files.get(path)


@dataclass
class Budget:
    """Limits how much one reading of a script handles.

    Attributes:
        characters: Characters that are left.
        steps: Words and commands that are left.
    """

    characters: int = field(default_factory=lambda: MOST_CHARACTERS)
    steps: int = field(default_factory=lambda: MOST_STEPS)

    def check_nesting(self, location: str, text: str) -> None:
        """Check that the parentheses and braces of a text can be read.

        Raises:
            UserError: If too many are within each other.
        """
        depth = 0
        for match in re.finditer(r"[(){}]", text):
            depth = depth + 1 if match[0] in "({" else max(0, depth - 1)
            if depth > MOST_NESTED:
                limit = f"{MOST_NESTED} parentheses within each other"
                raise user_error("doctor-script-too-large", location=location, limit=limit)

    def spend(self, location: str, characters: int = 0, steps: int = 0) -> None:
        """Take from what is left.

        Args:
            location: File and line that are read.
            characters: Number of characters.
            steps: Number of words and commands.

        Raises:
            UserError: If there is not enough left.
        """
        self.characters -= characters
        self.steps -= steps
        if self.characters < 0:
            limit = f"{MOST_CHARACTERS} characters"
        elif self.steps < 0:
            limit = f"{MOST_STEPS} words and commands"
        else:
            return
        raise user_error("doctor-script-too-large", location=location, limit=limit)


def text_of_file(path: str) -> str | None:
    """The text of a regular file; None if it is too large, of the system, or cannot be read."""
    if os.path.realpath(path).startswith(OF_THE_SYSTEM) or not os.path.isfile(path):
        return None
    try:
        if os.path.getsize(path) > LARGEST_FILE:
            return None
        return Path(path).read_text("utf-8", errors="replace")
    except OSError:
        return None
