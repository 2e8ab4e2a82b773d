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
from megatron_ds.launch import libaio
from megatron_ds.launch.environment import prepare_environment
from megatron_ds.launch.extension_locks import find_stale_locks

NO_COMPILER = """\
There is no C++ compiler: {name} was not found. DeepSpeed builds its CPU ops with it.
Install one (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++), or name one in CXX,
and run the same command again."""


OFFLOAD_ADAM = "CPUAdamBuilder"
FILE_OPERATIONS = "AsyncIOBuilder"
CPU_OPS = {
    "ShareMemCommBuilder": "all-reduce through shared memory",
    "FusedAdamBuilder": "Adam",
    OFFLOAD_ADAM: "Adam for an optimizer offloaded to the CPU",
    FILE_OPERATIONS: "offloading to NVMe",
}
"""Builders in deepspeed.ops.op_builder, and purposes of the ops, on a machine without an
accelerator. With one, only OFFLOAD_ADAM and FILE_OPERATIONS run on the CPU."""

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
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import get_cxx_compiler

    compiler = str(get_cxx_compiler())
    if shutil.which(compiler) is None:
        print(NO_COMPILER.format(name=compiler), file=sys.stderr)
        return 1
    if get_accelerator().device_name() == "cpu":
        needed = [builder for builder in CPU_OPS if builder != FILE_OPERATIONS]
        built = [build(builder, folder) for builder in needed]
        status = 0 if all(built) else 1
    else:
        status = 0
        if not build(OFFLOAD_ADAM, folder):
            print("Only runs with --cpu-optimizer need this op: continuing without it")
    problem = libaio.find_problem()
    if problem is not None:
        print(f"Not built, as only runs that offload to nvme need it: {problem.render()}")
    elif not build(FILE_OPERATIONS, folder):
        print("Only runs that offload to nvme need this op: continuing without it")
    return status


def clear_stale_locks(folder: Path) -> None:
    """Remove the locks of killed builds, and print each."""
    for lock in find_stale_locks(folder):
        print(f"Removing {lock}: the lock of a killed build")
        lock.unlink(missing_ok=True)


def build(builder: str, folder: Path) -> bool:
    """Build an op, unless it is built; False, after printing the reason, if that fails.

    In a process of its own, so that the compiler's output goes to a file.
    """
    log = folder / f"{builder}.log"
    folder.mkdir(parents=True, exist_ok=True)
    what = f"DeepSpeed's C++ op for {CPU_OPS[builder]}"
    expected = "minutes" if builder == FILE_OPERATIONS else "about half a minute"
    print(f"Building {what} (once, {expected}) ...", end=" ", flush=True)
    start = time.monotonic()
    with log.open("w") as output:
        command = [sys.executable, "-c", BUILD, builder]
        code = subprocess.call(command, stdout=output, stderr=subprocess.STDOUT)
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
