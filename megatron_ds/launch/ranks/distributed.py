"""The process group: joining it, leaving it, and exchanging process information.

It also chooses the threads of this process, for torch on the host and DeepSpeed's CPU optimizer.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_ds.config import RuntimeConfig
from megatron_ds.config.devices import HOST, is_host
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.launch import cpp_ops, environment
from megatron_ds.launch.device import device_index
from megatron_ds.launch.environment import rank, world_size
from megatron_ds.launch.output import warn_on_rank
from megatron_ds.launch.ranks.host_differences import DEVICES
from megatron_ds.launch.ranks.host_variables import HostVariables, find_missing
from megatron_ds.launch.ranks.rank_exchange import exchange
from megatron_ds.launch.ranks.roll_call import RollCall
from megatron_ds.launch.watch import liveness
from megatron_ds.launch.watch.liveness import HostLocation, ProcessHandle, RankExit

if TYPE_CHECKING:
    import torch
    import torch.distributed

T = TypeVar("T")
R = TypeVar("R")

THREADS = "OMP_NUM_THREADS"
RECORDED_COLLECTIVES = 100
"""Collectives that torch's flight recorder keeps for the report of a rank that hangs."""
GLOO = "gloo"
COPYING = "gloo_copies"
"""gloo, for tensors that it does not communicate: see `host_copies`."""
IN_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Set by torchrun in its ranks, and not in its own environment."""


@dataclass(frozen=True)
class ProcessContext:
    """Ranks, device and communication backend of this process, and where the ranks run."""

    rank: int
    world_size: int
    device: torch.device
    backend: str
    locations: Mapping[int, HostLocation]
    """Locations of the first rank and the ranks of this host; on the first rank, of all. By rank,
    in their order."""
    missing_variables: Mapping[str, list[str]] = field(default_factory=dict)
    """Hosts that lack a variable of the launcher or of this rank, by variable; on the first rank
    only."""


def init_distributed(
    config: RuntimeConfig,
    rendezvous: Callable[[], AbstractContextManager[None]] = nullcontext,
    roll_call: RollCall | None = None,
) -> ProcessContext:
    """Initializes the process group and selects the device.

    Without a launcher, the world consists of this process.

    Args:
        config: Backend and timeout.
        rendezvous: Entered while this process waits for the other ones.
        roll_call: Roll call of the run, which all ranks must pass before they form the group.

    Raises:
        HostsDiffer: If the run cannot start on all hosts.
        UserError: If the launcher set an incomplete environment, or the device does not serve.
    """
    _set_single_process_env()
    if find_spec("deepspeed") is None:
        return _init_without_deepspeed(config)
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    if config.hang_timeout is not None:
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED_COLLECTIVES))
    accelerator = get_accelerator()
    backend = _select_backend(config, accelerator)
    if config.deterministic_mode:
        # cuBLAS reads it when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if config.tf32 and not is_host(accelerator.device_name()):
        torch.set_float32_matmul_precision("high")
    index = _select_device(accelerator, backend)
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    if roll_call is not None:
        roll_call.describe(DEVICES, {"the type of devices": accelerator.device_name()})
        roll_call.attend(timeout, rendezvous)
    with rendezvous():
        if backend in (GLOO, COPYING):
            # DeepSpeed would bind the group to the device. torch then splits further groups from
            # it, which gloo cannot.
            dist.init_process_group(backend, timeout=timeout)
        deepspeed.init_distributed(backend, timeout=timeout, verbose=False)
    if roll_call is not None:
        roll_call.close()
    locations, missing = exchange_locations(HostLocation.here(), HostVariables.here())
    choose_threads(locations[rank()], locations.values())
    device = torch.device(accelerator.device_name(index))
    return ProcessContext(rank(), world_size(), device, backend, locations, missing)


def _select_backend(config: RuntimeConfig, accelerator: Any) -> str:
    """The accelerator's communication backend, or gloo if it is requested or the other missing.

    Tensors of a device that gloo does not communicate are copied to the host.
    """
    import torch.distributed as dist

    native: str = accelerator.communication_backend_name()
    is_missing = native in ("ccl", "mpi") and not dist.is_backend_available(native)
    backend = GLOO if config.distributed_backend == GLOO or is_missing else native
    device = accelerator.device_name()
    if backend == GLOO and device not in dist.Backend.backend_capability[backend]:
        from megatron_ds.launch.ranks import host_copies

        host_copies.register(COPYING, device)
        return COPYING
    if config.distributed_backend not in (None, backend):
        problem = Problem("backend-unsupported", settings=config, device=device, backend=backend)
        warn_on_rank(problem)
    return backend


def _select_device(accelerator: Any, backend: str) -> int:
    """Select this process's device, and return its index."""
    if is_host(accelerator.device_name()):
        cpp_ops.leave_out_shared_memory_op()
        # torch maps fresh memory for every large tensor. Transparent huge pages (2 MiB instead of
        # 4 KiB) make that ten times cheaper, which saves a sixth of a training step.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        return 0
    index = device_index(
        environment.local_rank(),
        environment.local_world_size(),
        accelerator.device_count(),
        is_shared=environment.has_shared_devices(),
        may_share=backend in (GLOO, COPYING),
    )
    environment.use_device(index)
    accelerator.set_device(index)
    return index


def _init_without_deepspeed(config: RuntimeConfig) -> ProcessContext:
    """Initializes the process group by torch alone, which is enough for text generation.

    Tensors on devices that gloo does not support are communicated by their default backend.
    """
    import torch
    import torch.distributed as dist

    device = torch.device(HOST)
    backend = GLOO
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        device = torch.device(accelerator.type, environment.local_rank())
        torch.accelerator.set_device_index(device.index)
        if accelerator.type not in dist.Backend.backend_capability[backend]:
            backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, timeout=timedelta(minutes=config.distributed_timeout_minutes))
    locations, missing = exchange_locations(HostLocation.here(), HostVariables.here())
    return ProcessContext(rank(), world_size(), device, backend, locations, missing)


def exchange_locations(
    location: HostLocation, variables: HostVariables
) -> tuple[dict[int, HostLocation], dict[str, list[str]]]:
    """Locations of the ranks, and variables that hosts lack; see `ProcessContext`. Collective.

    Args:
        location: Location of this process.
        variables: Variables of this process.
    """
    key = location.host if rank() else ""
    message = [location.to_json(), variables.to_json()]
    locations, missing = _exchange(message, _locations_by_host, key)
    return {peer: HostLocation.from_json(value) for peer, value in locations}, missing


def _locations_by_host(ranks: Sequence[Any]) -> dict[str, Any]:
    """Values for every host by its name, and under "" for the first rank."""
    numbered = [(peer, location) for peer, (location, _) in enumerate(ranks)]
    by_host: dict[str, list[tuple[int, Any]]] = {}
    for peer, location in numbered:
        by_host.setdefault(location["host"], numbered[:1] if peer else []).append((peer, location))
    missing = find_missing([HostVariables.from_json(variables) for _, variables in ranks])
    return {"": (numbered, missing)} | {host: (members, {}) for host, members in by_host.items()}


def choose_threads(here: HostLocation, all_ranks: Iterable[HostLocation]) -> None:
    """Sets the number of threads, unless the user has chosen it in OMP_NUM_THREADS.

    The choice is the same under every launcher. Must precede the load of DeepSpeed's ops, which may
    have an OpenMP of their own, whose number of threads is the variable's.
    """
    import torch

    if THREADS in os.environ and not is_default_of_torchrun():
        return
    count = threads_of(here, all_ranks)
    os.environ[THREADS] = str(count)
    torch.set_num_threads(count)


def threads_of(here: HostLocation, all_ranks: Iterable[HostLocation]) -> int:
    """The cores of a process, divided by the processes of its host that may use one of them.

    A scheduler may have bound each process to cores of its own.
    """
    sharing = sum(rank.host == here.host and bool(rank.cores & here.cores) for rank in all_ranks)
    return max(1, len(here.cores) // max(1, sharing))


def is_default_of_torchrun() -> bool:
    """Whether OMP_NUM_THREADS=1 is from torchrun, which sets it if the user has not."""
    if IN_TORCHRUN not in os.environ or os.environ[THREADS] != "1":
        return False
    pid: int | None = os.getppid()
    while pid:
        names = liveness.initial_environment(pid)
        if IN_TORCHRUN not in names:  # torchrun itself, or unreadable
            return bool(names) and THREADS not in names
        pid = liveness.parent_of(pid)  # a wrapper of the program
    return False


def create_host_group(timeout: timedelta) -> torch.distributed.ProcessGroup | None:
    """A group of all ranks for tensors in host memory. Collective.

    Returns:
        None if the default group serves: it communicates through host memory itself.
    """
    import torch.distributed as dist

    return None if dist.get_backend() == GLOO else dist.new_group(backend=GLOO, timeout=timeout)


def destroy_process_group() -> None:
    """Destroys the process group, if it was initialized."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class ExitBoard:
    """The exit of the first rank that ended, in the store of the process group.

    Shared by all ranks of a run, on all hosts.
    """

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d

        # The existing connection may be blocked, waiting for a rank that never answers.
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()
        self._store.set(f"host of rank {rank()}", socket.gethostname())

    def hosts(self, ranks: Iterable[int]) -> dict[int, str]:
        """Names of the hosts of ranks."""
        return {rank: self._store.get(f"host of rank {rank}").decode() for rank in ranks}

    def post(self, rank_exit: RankExit) -> RankExit:
        """Posts an exit unless there already is one; returns the one that is posted."""
        entry = json.dumps(asdict(rank_exit))
        return RankExit(**json.loads(self._store.compare_set("first rank exit", "", entry)))

    def read(self) -> RankExit | None:
        """The posted exit, if any."""
        is_posted = self._store.check(["first rank exit"])
        return RankExit(**json.loads(self._store.get("first rank exit"))) if is_posted else None

    def is_first_report(self) -> bool:
        """Whether no rank has asked this before."""
        return int(self._store.add("reported", 1)) == 1

    def give_sign(self, rank: int) -> None:
        """Changes the sign of life of a rank."""
        self._store.add(f"sign of rank {rank}", 1)

    def signs(self, ranks: Iterable[int]) -> list[bytes]:
        """The signs of life of ranks, empty before their first one."""
        keys = [f"sign of rank {rank}" for rank in ranks]
        if not self._store.check(keys):
            return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]
        signs: list[bytes] = self._store.multi_get(keys)
        return signs

    def exchange_reports(
        self, report: str, expected: int | None, timeout_s: float
    ) -> tuple[list[str], list[int]]:
        """Posts the report of a rank that hangs.

        Args:
            report: Report of this rank.
            expected: Reports for which this rank waits to read them; None if another rank does.
            timeout_s: Longest wait for the other ranks.

        Returns:
            The reports, if this rank reads them, and the ranks that have posted none.
        """
        keys = [f"report of rank {peer}" for peer in range(world_size())]
        self._store.set(keys[rank()], report)
        count = self._store.add("reports", 1)
        end = time.monotonic() + timeout_s
        if expected is None:
            while not self._store.check(["silent ranks"]) and time.monotonic() < end + 1.0:
                time.sleep(0.1)
            return [], json.loads(self._store.get("silent ranks"))
        while count < expected and time.monotonic() < end:
            time.sleep(0.1)
            count = self._store.add("reports", 0)
        silent = [peer for peer, key in enumerate(keys) if not self._store.check([key])]
        self._store.set("silent ranks", json.dumps(silent))
        return [self._store.get(key).decode() for key in keys if self._store.check([key])], silent


def watched_peers(
    context: ProcessContext,
) -> tuple[ExitBoard | None, dict[int, ProcessHandle], dict[int, str]]:
    """The exit board (None for a single process), the other ranks of this host, and the known
    hosts by rank."""
    hosts = {peer: location.name for peer, location in context.locations.items()}
    if context.world_size == 1:
        return None, {}, hosts
    here = context.locations[context.rank]
    peers = {
        peer: location.process
        for peer, location in context.locations.items()
        if peer != context.rank and location.host == here.host
    }
    return ExitBoard(), peers, hosts


def _exchange(message: T, answer: Callable[[Sequence[T]], Mapping[str, R]], key: str = "") -> R:
    """Sends a message to the first rank and returns its answer, by key. Collective."""
    if world_size() == 1:
        return answer([message])[key]
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    return exchange(store, rank(), world_size(), message, answer, key)


def _set_single_process_env() -> None:
    """Sets what a launcher sets, for a world of one process."""
    values = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    missing = [name for name in (*values, "MASTER_PORT") if name not in os.environ]
    if not missing:
        return
    if world_size() > 1:
        raise user_error(
            "incomplete-launcher-environment", given="WORLD_SIZE", missing=", ".join(missing)
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        values["MASTER_PORT"] = str(probe.getsockname()[1])
    for name, value in values.items():
        os.environ.setdefault(name, value)
