"""Communication of tensors that no backend of torch communicates: by gloo, on copies on the host.

Apple's GPUs have no backend of their own. Their memory is the host's, so that copies are cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config.devices import HOST, is_host

METHODS = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    # Of a single tensor, by their names until torch 2.12 and since.
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "alltoall_base",
    "reduce_scatter_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
)
"""Methods of a process group with tensors: the first argument is what receives the results."""


def register(name: str, device: str) -> None:
    """Makes the backend known to torch, for tensors of a device and of the host.

    Args:
        name: Name of the backend.
        device: The type of a `torch.device`.
    """
    HostCopies.backend_name = name
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, HostCopies, devices=[HOST, device])


class HostCopies(dist.ProcessGroup):
    """A process group of gloo, which gets tensors of devices as copies on the host."""

    backend_name: ClassVar[str] = ""
    """Name by which torch knows the backend."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        gloo._set_sequence_number_for_group()
        self._inner = dist.ProcessGroup(store, rank, size)
        self._inner._register_backend(torch.device(HOST), self.BackendType.GLOO, gloo)
        self._inner._set_default_backend(self.BackendType.GLOO)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(HOST)]  # of collectives of objects

    def getBackendName(self) -> str:
        return self.backend_name

    def barrier(self, opts: Any = None) -> Any:
        return self._inner.barrier()


class _CopiedBack(dist.Work):
    """A started collective, after which its results are copied to the device."""

    def __init__(self, work: Any, copies: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._copies = copies

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done: bool = self._work.wait(timeout)
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        self._copies = []
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _forwarded(name: str) -> Callable[..., Any]:
    def call(self: HostCopies, results: Any, *arguments: Any) -> Any:
        copies: list[tuple[Tensor, Tensor]] = []
        on_host = _on_host(results, copies)
        # Other arguments are inputs. The memory of a result may be part of an input's.
        others = [_on_host(argument, []) for argument in arguments]
        work = getattr(self._inner, name)(on_host, *others)
        return _CopiedBack(work, [] if name == "send" else copies)

    return call


def _on_host(value: Any, copies: list[tuple[Tensor, Tensor]]) -> Any:
    """Copies of tensors of a device, which are noted, also in lists; anything else as it is."""
    if isinstance(value, list):
        return [_on_host(item, copies) for item in value]
    if not isinstance(value, Tensor) or is_host(value.device.type):
        return value
    copy = value.detach().to(HOST, memory_format=torch.contiguous_format)
    copies.append((value.detach(), copy))
    return copy


for _name in METHODS:
    setattr(HostCopies, _name, _forwarded(_name))
