"""Starts the programs that are measured, each in a process of its own, and reads their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.data.indexed_writer import pair_writer

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of this process's own process group."""
TAIL = 3000
"""Characters of the output of a failed program that are kept."""


@dataclass(frozen=True)
class Outcome:
    """End of a program."""

    status: int
    seconds: float
    output: str

    @property
    def out_of_memory(self) -> bool:
        return self.status != 0 and "out of memory" in self.output.lower()

    def describe(self) -> dict[str, Any]:
        """Plain values for a report; the end of the output only if the program failed."""
        tail = {"output": self.output[-TAIL:]} if self.status else {}
        return {"status": self.status, "wall_seconds": round(self.seconds, 1), **tail}


def run(words: Sequence[object], *, cpu: bool = False, timeout: float = 600) -> Outcome:
    """Run a program of the repository with this Python.

    Args:
        words: Script or "-m" and module, then arguments.
        cpu: Run on the CPU even if there is an accelerator.
        timeout: Seconds after which the program is killed, which is a failure.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    if cpu:
        environment["DS_ACCELERATOR"] = "cpu"
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, output = -1, (error.stdout or b"") + b"\nended after its time limit"
    return Outcome(status, time.perf_counter() - begin, output.decode(errors="replace"))


def read_json(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def flags(values: Mapping[str, object]) -> list[str]:
    """Command-line words of flags by field name; True stands alone, None and False are omitted."""
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += str(value).split()
    return words


def random_tokens(prefix: Path, vocab: int, count: int) -> Path:
    """Write token files of random documents; the last id of the vocabulary ends a document."""
    rng = np.random.default_rng(0)
    with pair_writer(prefix, np.uint16) as writer:
        for _ in range(max(4, count // 1000)):
            tokens = rng.integers(0, vocab - 1, 1000, dtype=np.uint16)
            writer.add_documents(np.append(tokens, vocab - 1), [1001])
    return prefix
