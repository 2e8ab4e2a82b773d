"""DeepSpeed's C++ ops: which ones there are, and building those that a run needs.

DeepSpeed compiles an op when it is first used, without a message, and the other processes that need
it wait for the lock of that build. This file builds before the first use and reports who does what.

torch builds an op under a lock file that the builder creates and holds open. Other processes wait
indefinitely and silently until the file is gone (torch.utils.file_baton). A builder that is killed
leaves the file, and every later load hangs. This file distinguishes a stale lock from one in use,
also by a process of another container or host, right before an op is loaded.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.dataclass import dataclass
from megatron_ds.launch.environment import local_rank, world_size
from megatron_ds.launch.output import print_error, waiting_for, with_rank_prefix
from megatron_ds.launch.watch.liveness import HostLocation

SHARED_MEMORY_OP = "deepspeed_shm_comm"
PROCESSES = Path("/proc")
LOCK = "lock"
"""torch's lock in the folder of an op."""
BUILDER = "builder.json"
"""The location of the process that built the op last, next to the lock."""
BUILD_SILENCE_S = 480.0
"""Time without a change in the folder of an op after which nobody builds it. Shorter than the
default timeout of the collective in which the other ranks wait."""
OLD_S = 7200.0
"""Age of the last change after which nobody builds it."""
POLL_S = 0.5


@dataclass(frozen=True)
class CppOp:
    """An op of DeepSpeed.

    Attributes:
        name: Its folder and file below TORCH_EXTENSIONS_DIR.
        builder: Its class in deepspeed.ops.op_builder.
        purpose: Feature that needs the op.
    """

    name: str
    builder: str
    purpose: str

    @property
    def folder(self) -> Path:
        """The folder of its build."""
        return Path(os.environ.get("TORCH_EXTENSIONS_DIR", ""), self.name)

    def is_built(self) -> bool:
        """Whether its library exists; DeepSpeed rebuilds it if a compiler flag has changed."""
        return (self.folder / f"{self.name}.so").is_file()

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
    """The first thing that this machine lacks to build an op; None if nothing."""
    compiler = compiler_command()
    if shutil.which(shlex.split(compiler)[0]) is None:
        return Problem("op-without-compiler", op=op, compiler=compiler)
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return Problem("op-without-headers", op=op, folder=headers)
    return None


def problems(ops: Sequence[CppOp]) -> list[Problem]:
    """Returns the reasons that ops that are not built yet cannot be built."""
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
    lock = op.folder / LOCK
    try:
        with waiting_for(f"the build of {op}, by this process or by the one that holds {lock}"):
            if reason := find_stale_lock(op):
                raise user_error("stale-build-lock", op=op, lock=lock, reason=reason)
            note_builder(op)
            get_accelerator().create_op_builder(op.builder).load(verbose=False)
    except UserError:
        raise
    except Exception as error:  # of torch, ninja or the compiler
        raise user_error("op-build-failed", op=op, error=str(error)[-2000:]) from error


def leave_out_shared_memory_op() -> None:
    """Keeps DeepSpeed from compiling an op at start that only its inference kernels call.

    It joins the processes of a CPU by shared memory; this package communicates by gloo. DeepSpeed
    reads the answer for no other op, and to have them all it would start compilers in each process.
    """
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})[SHARED_MEMORY_OP] = False


def note_builder(op: CppOp) -> None:
    """Writes next to the lock of an op that this process is about to build it.

    The lock itself is torch's and does not name its owner.
    """
    if not (op.folder / LOCK).exists():
        op.folder.mkdir(parents=True, exist_ok=True)
        (op.folder / BUILDER).write_text(json.dumps(HostLocation.here().to_json()))


def find_stale_lock(op: CppOp) -> str | None:
    """Waits while a process that is not visible from here may be building an op.

    It may run in another container, or on another host that shares the folder.

    Returns:
        Why the op's lock is stale; None without a lock, or if a process of this host holds it.
    """
    lock = op.folder / LOCK
    seen = 0
    since = time.monotonic()
    old_ns = _old_since_ns(op) if lock.exists() else 0
    while (lock_id := _file_id(lock)) and not _is_held(lock_id):
        changed = max(sum(_file_id(path)[2:]) for path in (op.folder, *op.folder.iterdir()))
        if changed != seen:
            seen = changed
            since = time.monotonic()
        reason = _describe_dead_builder(op, lock_id)
        if changed < old_ns or time.monotonic() - since > BUILD_SILENCE_S:
            reason = reason or "no process of this host holds it, and its folder has not changed"
        if reason and _file_id(lock) == lock_id:  # not released or taken again meanwhile
            return reason
        time.sleep(POLL_S)
    return None


def _old_since_ns(op: CppOp) -> int:
    """Time before which a change was long ago, by the clock of the file system: this host's may
    differ. 0 if it is unknown, because the folder is not writable."""
    try:
        with tempfile.TemporaryFile(dir=op.folder.parent) as file:
            return os.fstat(file.fileno()).st_mtime_ns - int(OLD_S * 1e9)
    except OSError:
        return 0


def _describe_dead_builder(op: CppOp, lock_id: tuple[int, ...]) -> str | None:
    """The process of this host that took a lock and has ended; None if the owner may be another."""
    note = op.folder / BUILDER
    here = HostLocation.here()
    with suppress(OSError, ValueError, TypeError, KeyError):
        builder = HostLocation.from_json(json.loads(note.read_text()))
        has_taken = builder.host == here.host and note.stat().st_mtime_ns <= lock_id[2]
        if has_taken and not builder.process.is_alive():
            return f"process {builder.process.pid}, which built it, has ended"
    return None


def _is_held(file_id: tuple[int, ...]) -> bool:
    """Whether a process of this host has a file open; True without /proc.

    Processes of other users, who have other extensions, are not visible.
    """
    if not PROCESSES.is_dir():
        return True
    descriptors = glob.iglob(f"{PROCESSES}/[0-9]*/fd/*")
    return any(_file_id(descriptor)[:2] == file_id[:2] for descriptor in descriptors)


def _file_id(path: str | Path) -> tuple[int, ...]:
    """Device, inode and modification time; empty if the file is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns
