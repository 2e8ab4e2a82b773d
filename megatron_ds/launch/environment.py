"""Environment variables: the rank that a launcher assigned, and settings of libraries.

Only files of this folder read or write environment variables.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

from megatron_ds.config.problems import user_error


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Global rank of this process; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Rank of this process on its host; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of processes on this host."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):  # torchrun's name, DeepSpeed's name
        if name in os.environ:
            return int(os.environ[name])
    return world_size()


def prepare_environment() -> Path:
    """Sets what DeepSpeed needs before it is imported.

    A virtual environment keeps DeepSpeed's C++ ops inside itself: in the shared default folder they
    would be rebuilt whenever another environment uses them. The environment's programs (ninja) are
    added to PATH, so that `.venv/bin/deepspeed` works without activating the environment.

    Returns:
        The folder of the C++ ops.
    """
    _silence_libraries()
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if programs not in path.split(os.pathsep):
        os.environ["PATH"] = programs + os.pathsep + path
    if "TORCH_EXTENSIONS_DIR" not in os.environ and sys.prefix != sys.base_prefix:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(sys.prefix) / "torch_extensions")
    default = Path.home() / ".cache" / "torch_extensions"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_tokenizer_threads() -> None:
    """Keeps tokenizer libraries from starting a thread per core in every process that encodes.

    Must be called before the first encoding: a forked process lacks its parent's threads.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")


def require_no_stale_locks(locks: list[Path]) -> None:
    """Raises:
    UserError: If there are stale locks of DeepSpeed's ops: loading an op would wait forever.
    """
    if locks:
        names = "\n".join(f"  {path}" for path in locks)
        raise user_error("stale-build-lock", names=names)


def _silence_libraries() -> None:
    """Suppresses library output that is of no use in a log; must run before the imports.

    DeepSpeed logs a hundred lines per process at its default level and warns that it found no GPU.
    torch warns about each collective that DeepSpeed calls by a deprecated name, and prints thirty
    C++ frames when a peer is gone, for which this package has messages of its own.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(lambda record: record.levelno >= logging.WARNING)
    logger.addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
    warnings.filterwarnings("ignore", message=".*is deprecated", module="torch.distributed")
