"""The process group: joining it, leaving it, and exchanging process information."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds.launch.liveness import HostLocation, ProcessHandle, RankExit

if TYPE_CHECKING:
    import torch

    from megatron_ds.config import RuntimeConfig
from megatron_ds.launch.environment import local_rank, local_world_size, rank, world_size
from megatron_ds.launch.output import print_on_rank


@dataclass(frozen=True)
class ProcessContext:
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


def init_distributed(config: RuntimeConfig) -> ProcessContext:
    """Joins the process group and takes the device.

    Without a launcher the process is a world of its own.
    """
    _set_single_process_env()
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name()
    if backend in ("ccl", "mpi") and not _has_backend(backend):
        backend = "gloo"
    if config.distributed_backend not in (None, backend):
        print_on_rank(
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
    _unlink_shared_memory()
    device = torch.device(accelerator.device_name(local_rank()))
    return ProcessContext(rank(), world_size(), local_rank(), device, backend)


def destroy() -> None:
    """Leaves the process group."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class StoreExitBoard:
    """What ended the first of the ranks, in the store through which they found each other."""

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d

        # A connection of its own: the other one may be waiting for a rank that never comes.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()

    def post(self, ending: RankExit) -> RankExit:
        text = self._store.compare_set("rank that ended", "", ending.to_json())
        return RankExit.from_json(text.decode())

    def read(self) -> RankExit | None:
        if not self._store.check(["rank that ended"]):
            return None
        return RankExit.from_json(self._store.get("rank that ended").decode())

    def count(self, what: str, more: int) -> int:
        return int(self._store.add(what, more))


def exchange_process_info() -> tuple[StoreExitBoard | None, dict[int, ProcessHandle]]:
    """What all ranks write on and read, and those of this machine by rank. Collective."""
    import torch.distributed as dist

    if world_size() == 1:
        return None, {}
    here = HostLocation.here()
    places: list[HostLocation] = [here] * world_size()
    dist.all_gather_object(places, here)
    others = ((number, place) for number, place in enumerate(places) if number != rank())
    return StoreExitBoard(), {number: place.process for number, place in others if here.sees(place)}


def _unlink_shared_memory() -> None:
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


def _set_single_process_env() -> None:
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


def _has_backend(name: str) -> bool:
    import torch.distributed as dist

    return dist.is_backend_available(name)
