"""Tensors that are described before they are read, so that a conversion holds one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Reads it, on the CPU; not cached."""

    @classmethod
    def of(cls, value: Tensor) -> LazyTensor:
        """A tensor that exists already, such as a memory-mapped one.

        Raises:
            ValueError: If it has more elements than values, as an expanded one.
        """
        if value.nbytes > (stored := value.untyped_storage().nbytes()):
            raise ValueError(f"a tensor of shape {list(value.shape)} has {stored} bytes")
        return cls(tuple(value.shape), value.dtype, lambda: value)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def to(self, dtype: torch.dtype | None) -> LazyTensor:
        """The tensor in another type, to which it is converted when it is read. None: as it is."""
        if dtype in (None, self.dtype):
            return self
        return replace(self, dtype=dtype, read=lambda: self.read().to(dtype))

    def first_rows(self, rows: int) -> LazyTensor:
        """The first rows of the tensor; all of it if it has no more."""
        if rows >= self.shape[0]:
            return self
        return replace(self, shape=(rows, *self.shape[1:]), read=lambda: self.read()[:rows])


LazyTensors = Mapping[str, LazyTensor]
"""By name."""
OnTensor = Callable[[str, int], None]
"""Called with name and bytes of each tensor that has been written."""
