"""Starts the programs that are measured, each in a process of its own, within a budget of time."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.data.token_files.indexed_writer import pair_writer
from megatron_ds.launch.ranks.rank_variables import RANK_VARIABLES

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHER = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
"""Variables of this process's own process group."""
TAIL = 3000
"""Characters of the output of a failed program that are kept."""
RUN_S = 600.0
"""Longest time of a program, in seconds."""
Row = dict[str, Any]
"""Figures of a case, or why there are none."""


class Budget:
    """Seconds in which all cases must end: nothing starts after them, and programs are ended."""

    def __init__(self) -> None:
        self.start(math.inf)

    def start(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; 0 if none are left."""
        return max(0.0, self._end - time.monotonic())

    def cases(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Take the next case only while there is time; say so if any may be missing."""
        rows = iter(rows)
        while self.left:
            row = next(rows, None)
            if row is None:
                return
            yield row
        yield {"name": "further cases", "skipped": "no time is left"}


budget = Budget()
"""Of this process."""


@dataclass(frozen=True)
class Outcome:
    """End of a program."""

    status: int
    seconds: float
    output: str

    @property
    def out_of_memory(self) -> bool:
        return self.status != 0 and "out of memory" in self.output.lower()

    def describe(self) -> Row:
        """Plain values for a report; the end of the output only if the program failed."""
        tail = {"output": self.output[-TAIL:]} if self.status else {}
        return {"status": self.status, "wall_seconds": round(self.seconds, 1), **tail}


def run(words: Sequence[object], *, cpu: bool = False, timeout: float = RUN_S) -> Outcome:
    """Run a program of the repository with this Python.

    Args:
        words: Script or "-m" and module, then arguments.
        cpu: Run on the CPU even if there is an accelerator.
        timeout: Seconds after which the program and its processes are killed, which is a failure.
            The budget may end them before.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    if cpu:
        environment["DS_ACCELERATOR"] = "cpu"
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=min(timeout, budget.left))
        except subprocess.TimeoutExpired:
            _kill_session(process.pid)
            output = process.communicate()[0] + b"\nended after its time limit"
        except BaseException:  # Ctrl-C and others do not reach the session
            _kill_session(process.pid)
            raise
    return Outcome(process.returncode, time.perf_counter() - begin, output.decode(errors="replace"))


def _kill_session(leader: int) -> None:
    """Kills a process that leads a session, and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def read_json(path: Path) -> Row:
    result: Row = json.loads(path.read_text(encoding="utf-8"))
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
    dtype = np.uint16 if vocab <= 2**16 else np.int32
    with pair_writer(prefix, dtype) as writer:
        for _ in range(max(4, count // 1000)):
            tokens = rng.integers(0, vocab - 1, 1000, dtype=dtype)
            writer.add_documents(np.append(tokens, vocab - 1), [1001])
    return prefix
