"""The complete path on this machine: text, tokenizer, token files, training, resuming, generating.

Prints and runs the commands that a user would type; all results go to one folder.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import user_error
from megatron_ds.demo.results import clear, summary
from megatron_ds.demo.steps import steps
from megatron_ds.programs import REPOSITORY, is_installed


@dataclass(frozen=True)
class Options:
    """Trains a small GPT on this machine: text, tokenizer, token files, training, resuming, loss
    curve, generated text.
    """

    PROGRAM: ClassVar[str] = "demo.py"

    data: str | None = option_field(None, metavar="FILE")
    """Text to train on: JSON lines with the key "text" (default: the standard library of
    Python)."""
    output: str = option_field("demo_run", metavar="FOLDER")
    """Folder for the results."""


def run(title: str, command: Sequence[object], folder: Path) -> None:
    """Print and run a command in a folder.

    Raises:
        UserError: If the command fails.
    """
    words = [str(word) for word in command]
    print(f"\n== {title}\n$ {shlex.join(words)}", flush=True)
    code = subprocess.call(words, cwd=folder)
    if code:
        script = next((word for word in words if word.endswith(".py")), shlex.join(words[:4]))
        raise user_error("demo-command-failed", script=script, status=code)


def work(options: Options) -> None:
    """The commands run in the repository, if there is one, so all paths are relative to it."""
    start = time.monotonic()
    base = Path.cwd() if is_installed() else REPOSITORY
    folder = Path(os.path.relpath(options.output, base))
    data = None if options.data is None else Path(os.path.relpath(options.data, base))
    os.chdir(base)
    clear(folder, data)
    for title, command in steps(folder, data):
        run(title, command, base)
    print(summary(folder, time.monotonic() - start, next_commands(folder)))


def next_commands(folder: Path) -> dict[str, str]:
    """What to do after the demo, with its command or page."""
    flags = f"--load {folder / 'checkpoints'}"
    page = "a page in the browser"
    if is_installed():
        return {page: f"megatron-ds serve {flags}"}
    python = os.path.relpath(sys.executable, REPOSITORY)
    return {
        page: f"make install && {python} tools/run_text_generation_server.py {flags}",
        "the same with your text": "make demo DATA=my.jsonl",
        "the same step by step": "docs/start/tutorial.md, up to a model that answers questions",
    }


main = cli.program(Options, work)
