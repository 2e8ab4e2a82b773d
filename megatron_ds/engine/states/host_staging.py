"""Copies of state dicts in host memory, which are written while training changes the states.

A file that is written from a copy equals one from the original, byte by byte: tensors of one
storage share one in the copy, and objects that occur twice are copied once. Knows nothing of
checkpoints.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megatron_ds.engine.states.threaded_copy import bytes_of_storage, copy_tensors

State = TypeVar("State")


class HostStaging:
    """Copies states to host memory, in which it reuses the buffers of the copy before.

    New memory is slow: the system clears each page at its first use, and an accelerator has to
    register it.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, list[torch.UntypedStorage]] = {}

    def copy(self, states: State) -> State:
        """Returns a copy that later changes of the states do not reach.

        The copy before, which has the same memory, becomes invalid.

        Args:
            states: Tensors and plain values in containers.
        """
        tensors = _find_tensors(states)
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}
        free = self._buffers
        used = defaultdict(list)
        copies: dict[int, torch.UntypedStorage] = {}
        pairs = []
        for key, storage in storages.items():
            size = storage.nbytes()
            buffers = free.get(size)
            buffer = buffers.pop() if buffers else _new_buffer(size)
            used[size].append(buffer)
            pairs.append((bytes_of_storage(buffer), bytes_of_storage(storage)))
            copies[key] = buffer
        copy_tensors(pairs)
        get_accelerator().synchronize()
        self._buffers = dict(used)
        memo: dict[int, Any] = {}
        for tensor in tensors:
            memo[id(tensor)] = _view(tensor, copies[tensor.untyped_storage()._cdata])
        for tensor in tensors:
            # A file has the attributes that DeepSpeed gives to some tensors.
            vars(memo[id(tensor)]).update(copy.deepcopy(vars(tensor), memo))
        return copy.deepcopy(states, memo)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(size * len(buffers) for size, buffers in self._buffers.items())


def _new_buffer(size: int) -> torch.UntypedStorage:
    """Host memory of this many bytes, page-locked if there is an accelerator that copies to it."""
    memory: Tensor = get_accelerator().pin_empty(size, dtype=torch.uint8)
    return memory.untyped_storage()


class _TensorFinder(pickle.Pickler):
    """Finds the tensors that a file of a value would have."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.tensors: list[Tensor] = []

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.tensors.append(value)
        return 0


def _find_tensors(value: object) -> list[Tensor]:
    by_id: dict[int, Tensor] = {}
    left = [value]
    while left:
        finder = _TensorFinder()
        finder.dump(left.pop())
        new = [tensor for tensor in finder.tensors if id(tensor) not in by_id]
        by_id |= {id(tensor): tensor for tensor in new}
        left += [vars(tensor) for tensor in new if vars(tensor)]
    return list(by_id.values())


def _view(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """A tensor like another one, of the copy of its storage."""
    values = torch.empty(0, dtype=tensor.dtype)
    values.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)
