"""The process's surroundings: environment variables, device, process group, rank-aware printing.

The only file that reads or writes environment variables and that may name a kind of device. It
knows
nothing of models, data or engines.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from megatron_ds.watch import Ending, Place, Process

if TYPE_CHECKING:
    import torch

    from megatron_ds.config import PrecisionConfig, RuntimeConfig


DEVICE_PACKAGES = (
    "torch_npu",
    "torch_sdaa",
    "torch_mlu",
    "torch_supa",
    "torch_xmlir",
    "habana_frameworks",
)
"""Packages by which DeepSpeed finds devices that torch itself does not know."""
FP16_FEATURES = frozenset({"avx512_fp16", "amx_fp16", "avx_ne_convert"})
"""Features of an x86 processor, in Linux's names: with one of them torch may compute in fp16."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write to a full disk is answered with."""


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
    _quieten_libraries()
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


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Around what a tool prints when its work is done: who reads it may have seen enough, as `head`
    has, and the rest goes nowhere."""
    with suppress(BrokenPipeError):
        try:
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            discard_output()
            raise


def discard_output() -> None:
    """What is still printed goes nowhere, and so does what waits to be flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Warnings go to stderr as lines for users, each once and without the code that warned."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if str(message) not in said:
            said.add(str(message))
            print(f"WARNING: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@dataclass(frozen=True)
class Runtime:
    """Where this process runs."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The last rank prints the log lines, as in Megatron."""
        return self.rank == self.world_size - 1


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


def start(config: RuntimeConfig) -> Runtime:
    """Joins the process group and takes the device.

    Without a launcher the process is a world of its own.
    """
    _alone_without_launcher()
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name()
    if backend in ("ccl", "mpi") and not _has_backend(backend):
        backend = "gloo"
    if config.distributed_backend not in (None, backend):
        say(
            f"WARNING: --distributed-backend {config.distributed_backend} is not what "
            f"{accelerator.device_name()} uses; taking {backend}"
        )
    if accelerator.device_name() == "cpu":
        # torch asks the system for fresh memory for every large tensor. In pages of 2 MiB (Linux)
        # that costs a tenth of what it does in pages of 4 KiB, a sixth of a training step.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if "OMP_NUM_THREADS" not in os.environ:
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
            torch.set_num_threads(max(1, cores // local_world_size()))
    else:
        accelerator.set_device(local_rank())
    deepspeed.init_distributed(
        dist_backend=backend,
        timeout=timedelta(minutes=config.distributed_timeout_minutes),
        verbose=False,
    )
    _unname_shared_memory()
    device = torch.device(accelerator.device_name(local_rank()))
    return Runtime(rank(), world_size(), local_rank(), device, backend)


def surely_lacks_fp16() -> bool:
    """Whether the device is a CPU that does not compute in fp16, as far as that can be told
    without torch; False leaves it to `require_precision`.
    """
    named = os.environ.get("DS_ACCELERATOR")
    if named is not None and named != "cpu":
        return False
    if named is None and not (
        version("torch").endswith("+cpu") and not any(map(find_spec, DEVICE_PACKAGES))
    ):
        return False
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    features = next((line for line in about.splitlines() if line.startswith("flags")), None)
    return features is not None and not FP16_FEATURES & set(features.split())


def no_fp16(device: str) -> str:
    """Why --fp16 does not go, and what does."""
    return (
        f"--fp16: DeepSpeed does not train in fp16 on {device}; take --bf16 "
        "(or, for a try, --allow-fp16-on-cpu)"
    )


def require_precision(config: PrecisionConfig) -> None:
    """Raises ValueError for a number format that the device does not compute in.

    --allow-fp16-on-cpu tells DeepSpeed that the device can: torch computes fp16 on a CPU, slowly.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if not config.fp16 or accelerator.is_fp16_supported():
        return
    if not config.allow_fp16_on_cpu:
        raise ValueError(no_fp16(accelerator.device_name()))
    import torch

    kind, known = type(accelerator), accelerator.supported_dtypes()
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: [*known, torch.half]


def stop() -> None:
    """Leaves the process group."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def say(text: str, *, on: int = 0) -> None:
    """Prints on one rank, at once."""
    if rank() == on % world_size():
        _print(text, sys.stdout)


def complain(text: str) -> None:
    """Prints to the standard error, on this rank."""
    _print(text, sys.stderr)


def signed(text: str) -> str:
    """A message with the program and, where there are several, the rank that it comes from."""
    who = "" if world_size() == 1 else f"rank {rank()}: "
    return f"{Path(sys.argv[0]).name}: {who}{text}"


def _print(text: str, stream: TextIO) -> None:
    try:
        # In one write: without buffers print() would give the line's end apart, and the lines of
        # two ranks would run into each other.
        print(f"{text}\n", end="", file=stream, flush=True)
    except OSError as error:
        # The run is to save all the same, and a rank that ends is not to stop at its last words.
        if error.errno in FULL:
            return  # there may be room for the next line
        # Whoever read it is gone: Ctrl-C ends the `tee` of a pipe as well, and a terminal is
        # closed. Nobody reads what the run says to that.
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, stream.fileno())
        os.close(silent)


def note_for_launcher(text: str) -> None:
    """Gives torchrun the words for its summary; other launchers have none."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


class StoreBoard:
    """What ended the first of the ranks, in the store through which they found each other."""

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d

        # A connection of its own: the other one may be waiting for a rank that never comes.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()

    def post(self, ending: Ending) -> Ending:
        text = self._store.compare_set("rank that ended", "", ending.to_json())
        return Ending.from_json(text.decode())

    def read(self) -> Ending | None:
        if not self._store.check(["rank that ended"]):
            return None
        return Ending.from_json(self._store.get("rank that ended").decode())

    def count(self, what: str, more: int) -> int:
        return int(self._store.add(what, more))


def meet() -> tuple[StoreBoard | None, dict[int, Process]]:
    """What all ranks write on and read, and those of this machine by rank. Collective."""
    import torch.distributed as dist

    if world_size() == 1:
        return None, {}
    here = Place.here()
    places: list[Place] = [here] * world_size()
    dist.all_gather_object(places, here)
    others = ((number, place) for number, place in enumerate(places) if number != rank())
    return StoreBoard(), {number: place.process for number, place in others if here.sees(place)}


def is_the_users(error: BaseException) -> bool:
    """Whether an error is the user's to mend: one of the values that this package checks, or of
    the files that it asks Python's own library for."""
    if not isinstance(error, ValueError | OSError) or error.__traceback__ is None:
        return False
    places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, OSError) and error.filename is not None:
        while places and _is_pythons(places[-1]):
            places.pop()
    return bool(places) and Path(__file__).parent in Path(places[-1]).parents


def _is_pythons(filename: str) -> bool:
    """Whether a file of code belongs to Python's library: <frozen os> and lib/python3.12/*."""
    library = Path(sysconfig.get_path("stdlib"))
    installed = "site-packages" in filename
    return filename.startswith("<frozen ") or (library in Path(filename).parents and not installed)


@contextmanager
def errors_in_words() -> Iterator[None]:
    """Ends the program with status 1 and one message for an error that is the user's to mend.

    That is a ValueError or an OSError raised in this package; any other keeps its traceback. Of the
    ranks that meet it, the first one speaks.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if not is_the_users(error):
            raise
        if _speaks_first():
            complain(signed(str(error)))
        raise SystemExit(1) from None


def deepspeed_version() -> str:
    import deepspeed

    version: str = deepspeed.__version__
    return version


def device_memory() -> dict[str, int]:
    """Bytes (and number) of the device's allocations by TensorBoard tag; empty on a CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return {}
    figures = accelerator.memory_stats() or {}
    return {
        "mem-reserved-bytes": figures.get("reserved_bytes.all.current", 0),
        "mem-allocated-bytes": figures.get("allocated_bytes.all.current", 0),
        "mem-allocated-count": figures.get("allocation.all.current", 0),
    }


class PeakMemory:
    """The most memory that this process has had at a time since this was made, beyond what it had
    then: the device's or, where that is a CPU, the process's own.
    """

    def __init__(self) -> None:
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        self._accelerator = None if accelerator.device_name() == "cpu" else accelerator
        if self._accelerator is None:
            with suppress(OSError):  # not Linux, or not ours to reset: then the peak is all of it
                Path("/proc/self/clear_refs").write_text("5")
            self._before = _process_status("VmRSS")
        else:
            self._accelerator.reset_peak_memory_stats()
            self._before = self._accelerator.memory_allocated()

    def bytes(self) -> int | None:
        """None where the system does not say."""
        if self._accelerator is not None:
            return int(self._accelerator.max_memory_allocated()) - (self._before or 0)
        peak = _process_status("VmHWM")
        return None if peak is None or self._before is None else peak - self._before


def _process_status(name: str) -> int | None:
    """Bytes of an entry of /proc/self/status, if there is one."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def screen() -> tuple[int, bool]:
    """Columns of the standard output, and whether it is a terminal."""
    if not sys.stdout.isatty():
        return 100, False
    return shutil.get_terminal_size().columns, True


def _unname_shared_memory() -> None:
    """Takes the name from the shared memory that DeepSpeed makes for ranks of one machine on CPUs:
    it lasts as long as a process holds it, and a run that is killed leaves none (66 MB a rank).
    """
    if "LOCAL_SIZE" not in os.environ:
        return
    parts = (os.getuid(), os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank())
    name = "_".join(["deepspeed_allreduce_buffer", *map(str, parts)])
    made = Path("/dev/shm") / name
    if made.exists():
        import torch.distributed as dist

        dist.barrier()  # the others have opened it, who look it up by its name
        made.unlink(missing_ok=True)


def _alone_without_launcher() -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if not missing:
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"the launcher set WORLD_SIZE but not {', '.join(missing)}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = ("0", "0", "1", "127.0.0.1", str(port))
    for name, value in zip(names, values, strict=True):
        os.environ.setdefault(name, value)


def _speaks_first() -> bool:
    """Whether no other rank has reported an error yet: most often they all have the same one.

    Asks the store through which the ranks found each other. Before there is one, the first process
    of each machine speaks.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return local_rank() == 0
    try:
        reports = dist.distributed_c10d._get_default_store().add("reported errors", 1)
    except RuntimeError:  # the rank that held the store is gone: better twice than never
        return True
    return bool(reports == 1)


def _has_backend(name: str) -> bool:
    import torch.distributed as dist

    return dist.is_backend_available(name)


def _quieten_libraries() -> None:
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
