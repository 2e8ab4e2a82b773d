"""Runs a test's function on several ranks on this machine, without leaving a process behind.

The ranks are forked from a process that has imported torch and DeepSpeed, communicate over gloo
through a file, and use one thread each. Every call has new ranks, so that nothing leaks from one
job into the next, and a job that crashes or hangs affects no other.

Run as a program, this file is a rank.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fork_server import ForkedProcess

REPOSITORY = Path(__file__).resolve().parent.parent


class RankError(AssertionError):
    """A rank's exception, with its traceback as text."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 600.0,
    modules: tuple[str, ...] = (),
) -> list[Any]:
    """Calls fn(rank, *args) on `world_size` ranks inside an initialized process group (gloo).

    Args:
        fn: A function at the top level of a module.
        world_size: Number of ranks.
        args: Further arguments; they are pickled.
        timeout: Seconds until all ranks must have finished.
        modules: What all ranks need and the fork server has not imported: it is imported once.

    Returns:
        What the ranks returned (it is pickled), in rank order.

    Raises:
        RankError: A rank failed; the message is the traceback of the first one.
        TimeoutError: A rank did not finish in time. Every process has ended in both cases.
    """
    from tests.fork_server import rank_environments, shared_fork_server

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((fn, args, timeout)))
        ranks = range(world_size)
        environments = rank_environments(world_size)
        logs = [folder / f"{rank}.log" for rank in ranks]
        server = shared_fork_server(modules=modules)
        processes = server.start(Path(__file__), [name], environments, logs)
        try:
            _wait(processes, folder, time.monotonic() + timeout)
        finally:
            with suppress(ProcessLookupError):  # the ranks are one process group
                os.killpg(processes[0].pid, signal.SIGKILL)
            for process in processes:
                process.wait()
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in ranks]


def _wait(processes: list[ForkedProcess], folder: Path, deadline: float) -> None:
    from tests.fork_server import wait_for_any

    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            if (status := process.poll()) is None:
                continue
            del running[rank]
            if status:
                raise RankError(_failure(folder, rank, status))
        seconds = deadline - time.monotonic()
        if seconds <= 0.0:
            raise TimeoutError(f"ranks {sorted(running)} did not finish in time")
        if running:
            wait_for_any([*running.values()], seconds)


def _failure(folder: Path, rank: int, status: int) -> str:
    """The first exception of any rank: its peers fail when they lose the connection."""
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        return f"rank {errors[0].stem} failed:\n{errors[0].read_text(encoding='utf-8')}"
    log = (folder / f"{rank}.log").read_text(errors="replace")
    return f"rank {rank} died without an exception, status {status}:\n{log[-3000:]}"


def main() -> None:
    """Runs one rank of a job."""
    import torch
    import torch.distributed as dist

    from megatron_ds.launch.cpp_ops import leave_out_shared_memory_op
    from megatron_ds.launch.environment import prepare_environment

    prepare_environment()  # DeepSpeed's ops are those of the installation
    leave_out_shared_memory_op()
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        fn, args, timeout = pickle.loads((folder / "job").read_bytes())
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = fn(rank, *args)
        dist.barrier()
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)


if __name__ == "__main__":
    main()
