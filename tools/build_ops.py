"""Builds DeepSpeed's C++ ops ahead of the first run, with a message, and clears stale locks.

DeepSpeed compiles an op when it is first used: half a minute of silence in the middle of a first
step, and a run that hangs for ever if that compilation is killed. `make` calls this once after
installation; calling it again is harmless.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.launch.environment import prepare_environment
from megatron_ds.launch.extension_locks import find_stale_locks

NO_COMPILER = """\
There is no C++ compiler: {name} was not found. DeepSpeed builds its CPU ops with it.
Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name one in CXX,
and run the same command again."""


@dataclass(frozen=True)
class Op:
    """A builder in deepspeed.ops.op_builder, and what it is for."""

    builder: str
    purpose: str


OFFLOAD_ADAM = Op("CPUAdamBuilder", "Adam for an optimizer offloaded to the CPU")
CPU_OPS = (
    Op("ShareMemCommBuilder", "all-reduce through shared memory"),
    Op("FusedAdamBuilder", "Adam"),
    OFFLOAD_ADAM,
)
"""What a machine without an accelerator uses. With one, only OFFLOAD_ADAM runs on the CPU."""

BUILD = """
import sys
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder(sys.argv[1]).load(verbose=True)
"""


def main(argv: list[str] | None = None) -> int:
    """The exit code: 0 if what every run needs is there."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.parse_args(argv)
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
        print("Runs with the optimizer on the accelerator do not need this op: going on without it")
    return 0


def clear_stale_locks(folder: Path) -> None:
    """Removes the locks of killed builds, naming each."""
    for lock in find_stale_locks(folder):
        print(f"Removing {lock}: a killed build left it behind, no process holds it")
        lock.unlink(missing_ok=True)


def missing_compiler() -> str | None:
    """The name of the C++ compiler that torch would call, if there is no such program."""
    from torch.utils.cpp_extension import get_cxx_compiler

    name = str(get_cxx_compiler())
    return None if shutil.which(name) else name


def accelerator() -> str:
    """The kind of device DeepSpeed finds."""
    from deepspeed.accelerator import get_accelerator

    return str(get_accelerator().device_name())


def build(op: Op, folder: Path) -> bool:
    """Builds one op, or finds it built; False, after printing why, if that fails.

    In a process of its own, so that what the compiler prints goes to a file.
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
        print(f"All that the build printed is in {log}", file=sys.stderr)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
