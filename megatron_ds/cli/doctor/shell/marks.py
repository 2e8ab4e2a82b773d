"""Text of a shell in which some characters are marked: quoted ones, and ones that are not known.

The marks are private planes of Unicode, whose characters mean nothing to a shell.
"""

from __future__ import annotations

import re

UNKNOWN = 0xF0000
"""Plane for what is known only when the script runs, as it is written."""
QUOTED = 0x100000
"""Plane for quoted text."""
FIELD = "\U000f0000"
"""Separates the elements of a list."""
EMPTY = "\U000f0001"
"""Replaces a quoted text that is empty."""
LOST = "\U000f0002"
"""Replaces an output."""
OPENED = re.compile("[\U000f0003-\U000fffff]+")
NAME = re.compile(r"\$([A-Za-z_]\w*|[0-9@*#?$!-])", re.ASCII)


def unmarked(text: str) -> str:
    """Expands variables; undefined ones are left verbatim."""
    return moved(text, UNKNOWN, 0)


def unquoted(text: str) -> str:
    """A text without the marks of quotes and of elements."""
    return moved(text.replace(EMPTY, "").replace(FIELD, " "), QUOTED, 0)


def moved(text: str, start: int, end: int) -> str:
    """A text with the characters of one plane of Unicode moved to another one."""
    if start and text.isascii():
        return text
    return "".join(chr(ord(c) - start + end) if 0 <= ord(c) - start < 2**16 else c for c in text)


def without_unset(text: str) -> str:
    """A text in which a variable that is not set is empty; Slurm's are set in a job."""

    def value(match: re.Match[str]) -> str:
        written = unmarked(match[0])
        name = NAME.fullmatch(written)
        return match[0] if name is None or name[1].startswith("SLURM_") else ""

    return OPENED.sub(value, text)


def glob_of(text: str) -> str:
    """The pattern of `fnmatch` for a pattern of the shell, in which quoted characters are text."""
    plain = re.sub(r"\[[!^]", "[!", text.replace(EMPTY, ""))
    return "".join(
        c if ord(c) < QUOTED else f"[{chr(ord(c) - QUOTED)}]" if chr(ord(c) - QUOTED) in "*?["
        else chr(ord(c) - QUOTED)
        for c in plain
    )  # fmt: skip
