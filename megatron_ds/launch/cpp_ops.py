"""DeepSpeed's C++ ops: which ones there are, and building those that a run needs.

DeepSpeed compiles an op when it is first used, without a message, and the other processes that need
it wait for the lock of that build. This file builds before the first use and says who does what.

torch builds an op under a lock file that the builder creates and holds open. Other processes wait
indefinitely and silently until the file is gone (torch.utils.file_baton). A builder that is killed
leaves the file, and every later run hangs. This file tells a stale lock from one in use.
"""

from __future__ import annotations

import glob
import os
import shlex
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.launch.environment import local_rank, world_size
from megatron_ds.launch.output import print_error, waiting_for, with_rank_prefix

SHARED_MEMORY_OP = "deepspeed_shm_comm"
PROCESSES = Path("/proc")


@dataclass(frozen=True)
class CppOp:
    """An op of DeepSpeed.

    Attributes:
        name: Its folder and file below TORCH_EXTENSIONS_DIR.
        builder: Its class in deepspeed.ops.op_builder.
        purpose: What it is needed for.
    """

    name: str
    builder: str
    purpose: str

    def is_built(self) -> bool:
        """Whether its library exists; DeepSpeed rebuilds it if a compiler flag has changed."""
        folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", ""), self.name)
        return (folder / f"{self.name}.so").is_file()

    def __str__(self) -> str:
        return f"DeepSpeed's C++ op {self.name} ({self.purpose})"


CPU_ADAM = CppOp("cpu_adam", "CPUAdamBuilder", "Adam for an optimizer offloaded to the CPU")
ASYNC_IO = CppOp("async_io", "AsyncIOBuilder", "offloading to NVMe")
FUSED_ADAM = CppOp("fused_adam", "FusedAdamBuilder", 'FusedAdam, by "torch_adam": false')


def compiler_command() -> str:
    """The name of the C++ compiler, as torch selects it."""
    return os.environ.get("CXX") or "c++"


def compiler_flags() -> list[str]:
    """The flags of the user for programs that are compiled and linked."""
    names = ("CFLAGS", "LDFLAGS")
    return [flag for name in names for flag in shlex.split(os.environ.get(name, ""))]


def find_problem(op: CppOp) -> Problem | None:
    """What this machine lacks to build an op."""
    compiler = compiler_command()
    if shutil.which(shlex.split(compiler)[0]) is None:
        return Problem("op-without-compiler", op=op, compiler=compiler)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return Problem("op-without-headers", op=op, folder=headers)
    return None


def problems(ops: Sequence[CppOp]) -> list[Problem]:
    """Why ops that are not built yet cannot be built."""
    problems = (find_problem(op) for op in ops if not op.is_built())
    return [problem for problem in problems if problem is not None]


def build(ops: Sequence[CppOp]) -> None:
    """Builds and loads ops, on the first process of each host. Collective.

    Raises:
        UserError: If an op cannot be built.
    """
    if not ops:
        return
    if local_rank() == 0:
        for op in ops:
            _load(op)
    if world_size() > 1:
        import torch.distributed as dist

        names = " and ".join(op.name for op in ops)
        with waiting_for(f"the first process of each host to build DeepSpeed's C++ ops: {names}"):
            dist.barrier()


def _load(op: CppOp) -> None:
    from deepspeed.accelerator import get_accelerator

    if not op.is_built():
        print_error(with_rank_prefix(f"building {op}, once, in about a minute ..."))
    lock = Path(os.environ.get("TORCH_EXTENSIONS_DIR", ""), op.name, "lock")
    try:
        with waiting_for(f"the build of {op}, by this process or by the one that holds {lock}"):
            get_accelerator().create_op_builder(op.builder).load(verbose=False)
    except Exception as error:  # of torch, ninja or the compiler
        raise user_error("op-build-failed", op=op, error=str(error)[-2000:]) from error


def leave_out_shared_memory_op() -> None:
    """Keeps DeepSpeed from compiling an op at start that only its inference kernels call.

    It joins the processes of a CPU by shared memory; this package communicates by gloo.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__[SHARED_MEMORY_OP] = False


def require_no_stale_locks(folder: Path) -> None:
    """Raises a `UserError` if a folder of ops has stale locks: loading an op would wait forever."""
    if locks := find_stale_locks(folder):
        names = "\n".join(f"  {path}" for path in locks)
        raise user_error("stale-build-lock", names=names)


def find_stale_locks(folder: Path) -> list[Path]:
    """Returns the locks below a folder of extensions that no process of this host holds open.

    Checks `<extension>/lock` and, for torch's default folder, `<version>/<extension>/lock`.
    Processes of other hosts that share the folder are not seen.

    Args:
        folder: The folder that TORCH_EXTENSIONS_DIR names; it need not exist.

    Returns:
        Sorted paths. Empty without /proc.
    """
    if not PROCESSES.is_dir():
        return []
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    file_ids = {lock: _file_id(lock) for lock in locks}
    # Without the processes of other users, who have other extensions.
    descriptors = glob.iglob(f"{PROCESSES}/[0-9]*/fd/*") if locks else ()
    held = {_file_id(descriptor)[:2] for descriptor in descriptors}
    # A lock that was released, or taken again, during the check is in use.
    return sorted(
        lock
        for lock, file_id in file_ids.items()
        if file_id and file_id[:2] not in held and _file_id(lock) == file_id
    )


def _file_id(path: str | Path) -> tuple[int, ...]:
    """Device, inode and modification time; empty if the file is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns
