"""Whether this machine can run DeepSpeed's asynchronous file operations, which need libaio."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

from megatron_ds.config.problems import Problem
from megatron_ds.launch import device
from megatron_ds.launch.cpp_ops import ASYNC_IO, compiler_command, compiler_flags
from megatron_ds.launch.cpp_ops import find_problem as find_build_problem

PROBE = """
#include <libaio.h>
int main() { io_context_t context = 0; return io_setup(1, &context) != 0; }
"""


def find_problem() -> Problem | None:
    """Why a program that uses libaio cannot be built and run; None if it can.

    DeepSpeed tests the same before it loads its operations, even if they are built.
    """
    if (problem := find_build_problem(ASYNC_IO)) is not None:
        return problem
    if device.lacks_toolkit():
        return Problem("nvme-without-toolkit")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(PROBE, encoding="utf-8")
        compiler = shlex.split(compiler_command())
        command = [*compiler, str(source), "-o", str(program), *compiler_flags(), "-laio"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            lines = [line for line in built.stderr.splitlines() if "error" in line or "ld:" in line]
            return Problem("nvme-without-libaio", error=(lines or ["it cannot be linked"])[0])
        status = subprocess.run([program], check=False).returncode
    return Problem("nvme-refused-by-kernel") if status else None
