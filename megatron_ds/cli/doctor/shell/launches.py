"""Programs that a script starts, and scripts that shells and Slurm read behind launchers."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Protocol

from megatron_ds.cli.doctor.shell.marks import LOST
from megatron_ds.cli.doctor.shell.reading import LARGEST_FILE, Reading
from megatron_ds.cli.doctor.shell.tokens import WORDS
from megatron_ds.cli.doctor.shell.variables import Variables

Result = tuple[bool | None, str]
"""Status and output of a command; None and LOST if they are known only when the script runs."""


class Script(Protocol):
    """The script that starts programs."""

    reading: Reading
    variables: Variables
    path: str
    job_options: list[str]

    def read(self, text: str, line: int = 1, *, is_same_shell: bool = False) -> Result:
        """Reads a script in place of this one."""

    def read_job(self, text: str, line: int = 1, options: Sequence[str] = ()) -> Result:
        """Reads a script that may have options of Slurm."""

    def unread(self, text: str, taken: str = "") -> str:
        """Notes a construct that is not read."""


class Launches:
    """Starts programs.

    Args:
        script: The script, whose reading they are added to.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._launcher: list[str] = []
        """Words of the command in front of a shell whose script is being read, such as a
        launcher."""

    def start(self, fields: list[str], text: str, line: int, text_line: int) -> Result:
        """Reads the script that a shell or Slurm gets, or notes the program.

        Args:
            fields: The program and its arguments.
            text: Its input.
            line: Its line.
            text_line: The first line of its input, if this is a here-document.
        """
        for index, name in enumerate(fields):
            if name.endswith(".py"):
                break
            base = os.path.basename(name)
            is_shell = base in WORDS["shells"][: None if index == 0 else -2]
            rest = fields[index + is_shell :]
            options = [i for i, word in enumerate(rest[:3], 1) if re.fullmatch("-[a-z]*c", word)]
            if base == "sbatch":
                return self._submit(fields[index:], text, line, text_line)
            if is_shell and options:
                launcher = fields[:index]
                command = "".join(rest[options[0] :][:1])
                return self._read(command, line, launcher)
            if is_shell and text and LOST not in text and all(w[0] in "-+" for w in rest if w):
                return self._read(text, text_line, fields[:index])
            if rest and (is_shell or name.endswith(WORDS["scripts"])):
                while is_shell and len(rest) > 1 and rest[0].startswith("-"):
                    rest = rest[1:]
                is_same = base in WORDS["shells"][-2:]
                return self._read_file(rest, is_same_shell=is_same, written=fields[index:])
        location = f"{self._script.path}:{line}"
        self._script.reading.started.append(([*self._launcher, *fields], location))
        if self._script.job_options:
            self._script.reading.job_options[location] = self._script.job_options
        return None, LOST

    def _read(self, text: str, line: int, launcher: Sequence[str]) -> Result:
        outside = self._launcher
        self._launcher = [*outside, *launcher]
        try:
            return self._script.read(text, line)
        finally:
            self._launcher = outside

    def _read_file(
        self,
        words: list[str],
        options: Sequence[str] | None = None,
        *,
        is_same_shell: bool = False,
        written: Sequence[str] = (),
    ) -> Result:
        """Reads a script with its arguments; of a job of Slurm with these options."""
        script = self._script
        text = script.reading.content(words[0], script.path)
        if text is None:
            reason = f"the file is not there, or larger than {LARGEST_FILE} bytes"
            script.unread(" ".join(written or words), reason)
            return None, LOST
        outside = script.path, script.variables.arguments
        script.path = words[0]
        if not is_same_shell or len(words) > 1:
            script.variables.arguments = tuple(words)
        try:
            if options is not None:
                return script.read_job(text, 1, options)
            return script.read(text, is_same_shell=is_same_shell)
        finally:
            script.path, script.variables.arguments = outside

    def _submit(self, words: list[str], text: str, line: int, text_line: int) -> Result:
        """Reads the script that sbatch gets as a file, in --wrap, or as its input."""
        outside = self._launcher
        self._launcher = []
        try:
            for index, word in enumerate(words[1:], 1):
                name, equals, command = word.partition("=")
                if name == "--wrap":
                    command = command if equals else "".join(words[index + 1 : index + 2])
                    return self._script.read_job(command, line, words[1:index])
                is_file = self._script.reading.content(word, self._script.path) is not None
                if not word.startswith("-") and (is_file or word.endswith(WORDS["scripts"])):
                    return self._read_file(words[index:], words[1:index])
            if text and LOST not in text:
                return self._script.read_job(text, text_line, words[1:])
        finally:
            self._launcher = outside
        self._script.unread(" ".join(words), "its script is not known")
        return None, LOST
