"""Build DeepSpeed's C++ ops before the first run, and remove stale locks of killed builds.

Only runs with offload use these ops, and build them when they first need them, which takes a minute
each; on a cluster they are better built once, before the job. Calling it again is harmless.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import Problem
from megatron_ds.launch import cpp_ops
from megatron_ds.launch.cpp_ops import ASYNC_IO, CPU_ADAM, CppOp
from megatron_ds.launch.environment import prepare_environment
from megatron_ds.launch.output import waiting_for
from megatron_ds.planning import swap_disk

OPS = {"adam": (CPU_ADAM,), "aio": (ASYNC_IO,), "all": (CPU_ADAM, ASYNC_IO)}
BUILD = """
import sys
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder(sys.argv[1]).load(verbose=True)
"""


@dataclass(frozen=True)
class Options:
    """Builds DeepSpeed's C++ ops before the first run, and removes the locks of killed builds."""

    PROGRAM: ClassVar[str] = "build_ops.py"

    ops: str = option_field("all", choices=tuple(OPS), positional=True)
    """adam for --cpu-optimizer, aio for offloading to NVMe, or all that can be built here."""


def work(options: Options) -> int:
    """The exit status: 0 if what can be built here is, and something can."""
    folder = prepare_environment()
    folder.mkdir(parents=True, exist_ok=True)
    clear_stale_locks(OPS[options.ops])
    reasons = {op: find_problem(op) for op in OPS[options.ops]}
    for problem in filter(None, reasons.values()):
        print(problem.render(), file=sys.stderr)
    possible = [op for op, problem in reasons.items() if problem is None]
    return 0 if possible and build(possible, folder) else 1


def find_problem(op: CppOp) -> Problem | None:
    """Returns the reason that an op cannot be built here."""
    return swap_disk.find_problem() if op is ASYNC_IO else cpp_ops.find_problem(op)


def clear_stale_locks(ops: Sequence[CppOp]) -> None:
    """Remove the locks of builds that were killed, and print each."""
    for op in ops:
        lock = op.folder / cpp_ops.LOCK
        with waiting_for(f"the process of another host or container that may hold {lock}"):
            reason = cpp_ops.find_stale_lock(op)
        if reason:
            print(f"Removing {lock}, which a killed build has left: {reason}")
            lock.unlink(missing_ok=True)


def build(ops: Sequence[CppOp], folder: Path) -> bool:
    """Build ops at the same time, unless they are built; False if one fails, which is printed.

    In processes of their own, so that the compiler's output goes to files.
    """
    start = time.monotonic()
    builds = []
    for op in ops:
        print(f"Building {op} (once, about a minute) ...", flush=True)
        cpp_ops.note_builder(op)
        with (folder / f"{op.name}.log").open("w") as log:
            command = [sys.executable, "-c", BUILD, op.builder]
            builds.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    for op, process in zip(ops, builds, strict=True):
        outcome = "FAILED" if process.wait() else "done"
        print(f"{op.name}: {outcome} after {time.monotonic() - start:.0f} s", flush=True)
        if process.returncode:
            path = folder / f"{op.name}.log"
            lines = path.read_text(errors="replace").splitlines()
            shown = [line for line in lines if "error:" in line][:5] or lines[-15:]
            print("\n".join(f"  {line}" for line in shown), file=sys.stderr)
            print(f"The complete output is in {path}", file=sys.stderr)
    return all(process.returncode == 0 for process in builds)


main = cli.program(Options, work)
