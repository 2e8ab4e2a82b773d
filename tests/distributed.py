"""Runs a test's function on several processes of this machine, without leaving one behind.

The processes are spawned, talk over gloo through a file, and use one thread each. Starting one
costs seconds (it imports torch), so let one call check many cases.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any


class RankError(AssertionError):
    """A rank's exception, with its traceback as text."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0
) -> list[Any]:
    """Call fn(rank, *args) on world_size processes inside an initialised torch.distributed (gloo).

    fn: a function at the top level of a module. Returns what the ranks returned (it is pickled), in
    rank order. Raises RankError with the traceback of the first rank that failed, and TimeoutError
    if they are not all done after `timeout` seconds; every process has ended by then.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes: list[SpawnProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                job = (theirs, fn, rank, world_size, str(Path(folder) / "store"), timeout, args)
                process = context.Process(target=_run_rank, args=job, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            results = _collect(pipes, time.monotonic() + timeout)
            for process in processes:
                process.join(timeout=30.0)
            return results
        finally:
            _end(processes)


def _run_rank(
    pipe: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store: str,
    timeout: float,
    args: tuple[Any, ...],
) -> None:
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = fn(rank, *args)
        dist.barrier()
        pipe.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise SystemExit(1) from None


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    """The ranks' results, or the exception of the one that failed first."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise TimeoutError(f"ranks {missing} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                succeeded, value = pipes[rank].recv()
            except EOFError:
                raise RankError(f"rank {rank} died without an exception") from None
            if not succeeded:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _end(processes: list[SpawnProcess]) -> None:
    """End the processes that still run: the others of a failed or hanging one."""
    for process in processes:
        if process.exitcode is None:
            process.terminate()
    for process in processes:
        process.join(timeout=5.0)
        if process.exitcode is None:
            process.kill()
            process.join()
