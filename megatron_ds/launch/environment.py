"""Environment variables: the ranks that a launcher assigned, and the settings of libraries."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process among all; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Number of this process on its machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of processes on this machine. torchrun and DeepSpeed's launcher name it
    differently.
    """
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        if name in os.environ:
            return int(os.environ[name])
    return world_size()


def prepare_environment() -> Path:
    """Sets what DeepSpeed needs before it is imported; gives the folder of its C++ ops.

    A virtual environment keeps its ops within itself: the shared default folder would be rebuilt
    whenever another environment uses it. The environment's programs (ninja) are put on the path,
    so that `.venv/bin/deepspeed` works in a shell that has not activated it.
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


def use_one_thread_per_tokenizer() -> None:
    """Keeps tokenizer libraries from starting threads for all cores in every process that encodes.

    To be called before they encode: a process made by a fork lacks the threads of its parent.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")


def refuse_stale_locks(locks: list[Path]) -> None:
    """Ends the program, naming the locks, if a killed build of a DeepSpeed op left any.

    Every later load of that op would wait for the lock for ever, without a word.
    """
    if locks:
        names = "\n".join(f"  {path}" for path in locks)
        raise SystemExit(
            "a killed build of a DeepSpeed op left its lock behind, and loading the op would wait "
            f"for it for ever:\n{names}\nDelete it, or run: python tools/build_ops.py"
        )


def _silence_libraries() -> None:
    """Keeps what is of no use to the reader of a log out of it; to be called before the imports.

    DeepSpeed logs a hundred lines per process at its default level, and warns that it found no
    GPU; torch warns of each call of a collective that DeepSpeed makes by its old name, and lists
    thirty frames of its own when another rank is gone, for which we have words.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(lambda record: record.levelno >= logging.WARNING)
    logger.addFilter(lambda record: "Setting accelerator to CPU" not in str(record.msg))
    warnings.filterwarnings("ignore", message=".*is deprecated", module="torch.distributed")
