"""Graphs of the kernels of a function, with the interface of torch's, on any device.

A replay runs the recorded kernels again, on the same memory, and none of the Python code between
them: what the code would compute on the host is that of the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
REFUSED = {
    aten._local_scalar_dense.default: "reads a number of the device",
    aten.nonzero.default: "reads a size from the device",
    aten.lift_fresh.default: "copies numbers of the host",
}
"""Kernels that a graph must not have, because the host takes part."""


class Recorder(TorchDispatchMode):
    """Records the kernels that are run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in REFUSED:
            raise RuntimeError(f"operation not permitted in a graph: {func} {REFUSED[func]}")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def tensors_of(result: Any) -> list[Tensor]:
    results = result if isinstance(result, (tuple, list)) else [result]
    return [each for each in results if isinstance(each, Tensor)]


def make_graphed_callables(
    function: Callable[..., Tensor], sample_args: tuple[Tensor, ...], pool: object = None
) -> Callable[..., Tensor]:
    """A function that replays another one, whose arguments it copies to `sample_args`."""
    with Recorder() as recorder:
        output = function(*sample_args)

    def replay(*args: Tensor) -> Tensor:
        for static, given in zip(sample_args, args, strict=True):
            static.copy_(given)
        for func, inputs, options, result in recorder.calls:
            again = func(*inputs, **options)
            for old, new in zip(tensors_of(result), tensors_of(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)
        return output.detach()

    return replay


def graph_pool_handle() -> object:
    return object()
