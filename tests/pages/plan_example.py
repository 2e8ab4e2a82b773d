"""The example of docs/running/planning.md: what its first command prints, and its picture."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex

from megatron_ds.planning import command as plan
from tests.pages.flags import REPOSITORY

OUTPUT = REPOSITORY / "docs" / "running" / "planning.md"
BEGIN = "<!-- begin: generated example -->\n"
END = "<!-- end -->\n"
PICTURE = "docs/images/plan.png"


def page() -> str:
    """docs/running/planning.md with what the command above the example prints."""
    head, _, rest = OUTPUT.read_text(encoding="utf-8").partition(BEGIN)
    return f"{head}{BEGIN}```\n{_output(_command(head))}```\n{END}{rest.partition(END)[2]}"


def draw() -> None:
    """Draws the picture again."""
    _output([*_command(OUTPUT.read_text(encoding="utf-8")), "--plot", PICTURE])


def _command(text: str) -> list[str]:
    found = re.search(r"^    python tools/plan\.py ((?:.*\\\n)*.*)$", text, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1].replace("\\\n", " "))


def _output(words: list[str]) -> str:
    printed = io.StringIO()
    with contextlib.chdir(REPOSITORY), contextlib.redirect_stdout(printed):
        assert plan.main(words) == os.EX_OK
    return printed.getvalue()
