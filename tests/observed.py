"""Watches the operations of torch that a block of code calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Observed(TorchDispatchMode):
    """Calls `see` with operator, arguments and result of each operation inside."""

    def __init__(self, see: Callable[[Any, tuple[Any, ...], Any], object]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(func.overloadpacket, args, result)
        return result


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors that an operation returned."""
    results = result if isinstance(result, tuple | list) else (result,)
    return [one for one in results if isinstance(one, Tensor)]
