"""Copies in host memory by several threads: one core does not reach the memory's bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.launch.environment import available_cores, local_world_size

Item = TypeVar("Item")

CHUNK = 2**24
"""Bytes that are copied at once."""
MAX_THREADS = 8


def copy_tensors(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies tensors.

    Copies between CPU tensors use several threads. Copies to and from an accelerator are
    non-blocking: they are complete when it is synchronized.

    Args:
        pairs: Targets and sources of equal shape and type.
    """
    chunks: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for target, source in pairs:
            is_flat = target.is_contiguous() and source.is_contiguous()
            if not (is_host(target.device.type) and is_host(source.device.type) and is_flat):
                target.copy_(source, non_blocking=True)
                continue
            size = max(1, CHUNK // target.element_size())
            parts = (tensor.detach().view(-1).split(size) for tensor in (target, source))
            chunks += zip(*parts, strict=True)
        in_threads(lambda pair: pair[0].copy_(pair[1]), chunks)


def in_threads(function: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Calls a function that releases the GIL with each item, in any order.

    There are as many threads as cores for each process of this host.
    """
    threads = min(MAX_THREADS, available_cores() // (local_world_size() or 1), len(items))
    if threads <= 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(function, items):
            pass


def bytes_of_storage(storage: torch.UntypedStorage) -> Tensor:
    """A storage as a tensor, uint8 [bytes]."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),))  # type: ignore[call-overload, no-any-return]
