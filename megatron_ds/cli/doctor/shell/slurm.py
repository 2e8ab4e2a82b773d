"""Options of Slurm jobs: the #SBATCH lines of a script, and what they say about processes."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence

from megatron_ds.config.data_files import read_table

SBATCH = re.compile(r"#SBATCH(.*)")
SHORT = re.compile(r"^(-[Nn])(\d+)$")
"""A short option with its value, such as -N4."""


def job_options(text: str) -> tuple[list[str], list[tuple[int, str]]]:
    """The options of a script, and lines that are not read, with the reasons.

    As Slurm reads them: in the lines that begin with #SBATCH before the first command; a # outside
    of quotes begins a comment.
    """
    options = list[str]()
    unread = list[tuple[int, str]]()
    is_behind = False
    for row, line in enumerate(text.splitlines(), 1):
        match = SBATCH.match(line)
        if match is None:
            is_behind |= bool(line.strip()) and not line.lstrip().startswith("#")
        elif "<<" in text and is_behind:  # it may be in a here-document
            break
        elif is_behind:
            unread.append((row, f"{line}: Slurm reads no option behind the first command"))
        else:
            try:
                options += shlex.split(match[1], comments=True)
            except ValueError as error:
                unread.append((row, f"{line}: {error}"))
    return options, unread


def counts(words: Sequence[str]) -> dict[str, int]:
    """Nodes, processes of a node and of all, as far as options of launchers specify them."""
    units = read_table(__file__)["counts"]
    result = {}
    words = [part for word in words for part in SHORT.sub(r"\1 \2", word).split(" ")]
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, value = word.lstrip("-").partition("=")
        match = re.search(r"(\d{1,9})$", value if equals else following)
        unit = units.get(name.replace("_", "-")) if word.startswith("-") else None
        if unit:
            result[unit] = int(match[1]) if match else 0
    return result


def job_variables(options: Sequence[str]) -> dict[str, str]:
    """The variables that Slurm sets in a job with these options."""
    known = counts(options)
    units = read_table(__file__)["variables"]
    return {name: str(known[unit]) for name, unit in units.items() if unit in known}
