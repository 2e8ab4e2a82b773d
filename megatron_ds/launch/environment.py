"""Environment variables: the rank that a launcher assigned, and settings of libraries.

Only files of this folder read or write environment variables.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_ds.launch.ranks import rank_variables

GIVEN_LOCAL_RANK = "MEGATRON_DS_LOCAL_RANK"
"""The local rank of the launcher, whose variable `use_device` changes."""


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Global rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def rank_of_launcher() -> str | None:
    """The rank that `torchrun` or `deepspeed` gave this process; None if neither started it."""
    return os.environ.get("RANK")


def rendezvous() -> str:
    """Host and port at which the processes meet, as given to torch."""
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def local_rank() -> int:
    """Rank of this process on its host; 0 without a launcher.

    Also known before `adopt_ranks`, so that one process per host reports its error.
    """
    variables = (GIVEN_LOCAL_RANK, *rank_variables.LOCAL_RANK_VARIABLES)
    known = (os.environ[name] for name in variables if name in os.environ)
    return int(next(known, "0"))


def local_world_size() -> int | None:
    """Number of processes on this host; None if the launcher does not set it."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # torchrun's name, DeepSpeed's name
        if name in os.environ:
            return int(os.environ[name])
    return None


def elastic_run() -> str:
    """torchrun's rendezvous id, which is the same after a restart; "" if it has none."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if run == "none" else run  # its name for ranks with fixed addresses


def restarts_with_old_store() -> bool:
    """Whether torchrun, when it starts the ranks again, keeps the store with the old addresses.

    Only the environment of torchrun itself changes that.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return bool(elastic_run()) and restarts and is_store_of_agent()


def adopt_ranks() -> None:
    """Sets the variables of torch and DeepSpeed for a process that srun or mpirun started.

    Raises:
        UserError: If the environment reports other processes, but not what torch and DeepSpeed need
            to know.
    """
    os.environ.update(rank_variables.find_ranks(os.environ))


@contextmanager
def unchanged_ranks() -> Iterator[None]:
    """Restores the variables of ranks, which are not for processes that this one starts later, and
    how exceptions are shown: torch puts the rank in front of each line."""
    hook = sys.excepthook
    names = (*rank_variables.RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT", GIVEN_LOCAL_RANK)
    before = {name: os.environ[name] for name in names if name in os.environ}
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
        sys.excepthook = hook


def expand_variables(path: str) -> str:
    """A path in which `~` and variables such as `$SLURM_NODEID` are replaced by their values."""
    return os.path.expanduser(os.path.expandvars(path))


def spans_hosts() -> bool:
    """Whether the run has processes on other hosts; False if the launcher does not report it."""
    return world_size() > (local_world_size() or world_size())


def host_suffix() -> str:
    """` on HOST` for messages of a run that has several hosts; empty otherwise."""
    if not spans_hosts():
        return ""
    import socket

    return f" on {socket.gethostname()}"


def is_store_of_agent() -> bool:
    """Whether an agent of torchrun hosts the store at the rendezvous, and not the first rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def use_device(index: int) -> None:
    """Makes DeepSpeed use a device, whose index it reads from the variables of the local rank."""
    os.environ[GIVEN_LOCAL_RANK] = str(local_rank())
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):  # which it requires to be equal
        if name in os.environ:
            os.environ[name] = str(index)


def unused_tasks() -> int:
    """Tasks of a Slurm job that this process leaves idle, since srun did not start it; or 0."""
    return rank_variables.count_unused_tasks(os.environ)


def slurm_array_part() -> tuple[int, int] | None:
    """Index from 0 of this task in a Slurm array of consecutive numbers, and the number of tasks.

    None outside of such an array.
    """
    names = (f"SLURM_ARRAY_TASK_{name}" for name in ("ID", "MIN", "MAX", "STEP", "COUNT"))
    try:
        task, first, last, step, count = (int(os.environ[name]) for name in names)
    except KeyError:
        return None
    return ((task - first) // step, count) if (last - first) // step + 1 == count else None


def has_shared_devices() -> bool:
    """Whether the ranks of a host see the same devices, as under the agents of the launchers.

    A scheduler may let each of its tasks see a device of its own.
    """
    return any(name in os.environ for name in rank_variables.AGENT_VARIABLES)


def prepare_environment() -> Path:
    """Sets what DeepSpeed needs before it is imported.

    DeepSpeed's C++ ops are kept per virtual environment, inside it if it is writable: in the shared
    default folder they would be rebuilt whenever another environment uses them. They are kept per
    type of CPU, whose instructions they use: nodes of several types may share the environment. The
    environment's programs (ninja) are added to PATH, so that `.venv/bin/deepspeed` works without
    activating the environment.

    Returns:
        The folder of the C++ ops.
    """
    _silence_libraries()
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = programs + os.pathsep + path
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(_ops_folder())
    # DeepSpeed cannot parse variants of architectures ("9.0a"), which torch's own builds accept.
    if archs := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        os.environ["TORCH_CUDA_ARCH_LIST"] = re.sub(r"(\d+\.\d+)[a-z]", r"\1", archs)
    # A gloo group would connect every two ranks, with addresses that grow with the cube of the
    # ranks: 20 MB in the store of 128. On demand it connects those that communicate.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    return Path(os.environ["TORCH_EXTENSIONS_DIR"])


def available_cores() -> int:
    """Number of cores that this process may use."""
    return len(core_numbers())


def core_numbers() -> set[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def limit_tokenizer_threads() -> None:
    """Keeps tokenizer libraries from starting a thread per core in every process that encodes.

    Must be called before the first encoding: a forked process lacks its parent's threads.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")


def _ops_folder() -> Path:
    """The folder of DeepSpeed's C++ ops for this virtual environment and type of CPU."""
    inside = Path(sys.prefix) / "torch_extensions"
    is_virtual = sys.prefix != sys.base_prefix
    if is_virtual and os.access(inside if inside.exists() else sys.prefix, os.W_OK):
        return inside / cpu_type()
    import hashlib

    python = hashlib.sha256(f"{sys.prefix} {sys.version}".encode()).hexdigest()[:8]
    return Path.home() / ".cache" / "torch_extensions" / f"{python}-{cpu_type()}"


def cpu_type(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """A name for CPUs of the same model with the same instructions, such as `x86_64-0123abcd`."""
    import hashlib
    import platform

    names = ("flags", "model name", "Features", "CPU implementer", "CPU part")
    lines: list[str] = []
    with suppress(OSError):
        text = cpu_info.read_text(encoding="utf-8", errors="replace")
        lines = sorted({line for line in text.splitlines() if line.startswith(names)})
    return f"{platform.machine()}-{hashlib.sha256(repr(lines).encode()).hexdigest()[:8]}"


def _silence_libraries() -> None:
    """Suppresses library output that is of no use in a log; must run before the imports.

    DeepSpeed logs a hundred lines per process at its default level and warns that it found no GPU.
    torch warns about each collective that DeepSpeed calls by a deprecated name and that a barrier
    uses the current device, and prints thirty C++ frames when a peer is gone, for which this
    package has messages of its own.
    """
    import logging

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(lambda record: record.levelno >= logging.WARNING)
    logger.addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
    warnings.filterwarnings("ignore", message=".*is deprecated", module="torch.distributed")
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")
