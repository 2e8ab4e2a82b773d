"""Build DeepSpeed's C++ ops before the first run, with a message, and remove stale locks.

DeepSpeed compiles an op at its first use: half a minute of silence in the first step, and a run
that hangs indefinitely if that compilation is killed. `make` calls this once after installation;
calling it again is harmless.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds import cli
from megatron_ds.launch.environment import prepare_environment
from megatron_ds.launch.extension_locks import find_stale_locks

NO_COMPILER = """\
There is no C++ compiler: {name} was not found. DeepSpeed builds its CPU ops with it.
Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name one in CXX,
and run the same command again."""


@dataclass(frozen=True)
class Op:
    """A builder in deepspeed.ops.op_builder, and its purpose."""

    builder: str
    purpose: str


OFFLOAD_ADAM = Op("CPUAdamBuilder", "Adam for an optimizer offloaded to the CPU")
CPU_OPS = (
    Op("ShareMemCommBuilder", "all-reduce through shared memory"),
    Op("FusedAdamBuilder", "Adam"),
    OFFLOAD_ADAM,
)
"""Ops of a machine without an accelerator. With one, only OFFLOAD_ADAM runs on the CPU."""

BUILD = """
import sys
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder(sys.argv[1]).load(verbose=True)
"""


@dataclass(frozen=True)
class Options:
    """Builds DeepSpeed's C++ ops before the first run, and removes the locks of killed builds."""


def work(options: Options) -> int:
    """The exit status: 0 if the ops that every run needs are built."""
    folder = prepare_environment()
    clear_stale_locks(folder)
    compiler = missing_compiler()
    if compiler is not None:
        print(NO_COMPILER.format(name=compiler), file=sys.stderr)
        return 1
    if accelerator() == "cpu":
        failed = [op for op in CPU_OPS if not build(op, folder)]
        return 1 if failed else 0
    if not build(OFFLOAD_ADAM, folder):
        print("Only runs with --cpu-optimizer need this op: continuing without it")
    return 0


def clear_stale_locks(folder: Path) -> None:
    """Remove the locks of killed builds, and print each."""
    for lock in find_stale_locks(folder):
        print(f"Removing {lock}: the lock of a killed build")
        lock.unlink(missing_ok=True)


def missing_compiler() -> str | None:
    """The C++ compiler that torch would call, if it does not exist."""
    from torch.utils.cpp_extension import get_cxx_compiler

    name = str(get_cxx_compiler())
    return None if shutil.which(name) else name


def accelerator() -> str:
    """The kind of device that DeepSpeed detects."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def build(op: Op, folder: Path) -> bool:
    """Build an op, unless it is built; False, after printing the reason, if that fails.

    In a process of its own, so that the compiler's output goes to a file.
    """
    log = folder / f"{op.builder}.log"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"Building DeepSpeed's C++ op for {op.purpose} (once, about half a minute) ...", end=" ")
    sys.stdout.flush()
    start = time.monotonic()
    with log.open("w") as output:
        code = subprocess.call(
            [sys.executable, "-c", BUILD, op.builder],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    print(f"{'done' if code == 0 else 'FAILED'} after {time.monotonic() - start:.0f} s", flush=True)
    if code:
        tail = log.read_text(errors="replace").splitlines()[-15:]
        print("\n".join(f"  {line}" for line in tail), file=sys.stderr)
        print(f"The complete output is in {log}", file=sys.stderr)
    return code == 0


def main(argv: Sequence[str]) -> int:
    return cli.run(Options, work, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
