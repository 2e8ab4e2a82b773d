"""Tensors of a checkpoint that are described before they are read, whatever its layout is.

The interface between an engine and checkpoints of other layouts: states by canonical name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ds.model.declaration.architecture import unit_weights
from megatron_ds.parallel.weights import VOCABULARY, ShardSpec

MASTER = "master"
"""Kind of state: the weights that the optimizer steps. Other kinds have the optimizer's names."""
VOCABULARY_TABLES = tuple(
    name for name, weight in unit_weights().items() if weight.role in VOCABULARY
)
"""Tables whose rows are padded with zeros to a number that depends on the layout."""

Columns = tuple[int, Sequence[range]]
"""A dimension other than the first, and indices of it."""


@dataclass(frozen=True)
class TensorReader:
    """A tensor in files, whose rows are read on demand, on the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[range, Columns | None], Tensor]
    """Reads rows of the tensor; not cached."""
    is_indivisible: bool = False
    """Whether `load` reads the complete tensor, whatever is asked for."""

    @classmethod
    def of(cls, value: Tensor) -> TensorReader:
        """A tensor that exists already, such as a memory-mapped one.

        Raises:
            ValueError: If it has more elements than values, as an expanded one.
        """
        if value.nbytes > (stored := value.untyped_storage().nbytes()):
            raise ValueError(f"a tensor of shape {list(value.shape)} has {stored} bytes")
        return cls(tuple(value.shape), value.dtype, partial(part_of, value))

    @classmethod
    def full(
        cls, shape: tuple[int, ...], dtype: torch.dtype, load: Callable[[], Tensor]
    ) -> TensorReader:
        """A tensor that can only be read completely."""

        def read(rows: range, columns: Columns | None) -> Tensor:
            return part_of(load(), rows, columns)

        return cls(shape, dtype, read, is_indivisible=True)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, rows: range | None = None, columns: Columns | None = None) -> Tensor:
        """Reads the tensor, or part of it; may be a view of a file.

        Args:
            rows: Indices of dimension 0; those after the last are zeros. None: all.
            columns: Another dimension and indices of it; None: all.
        """
        size = self.shape[0] if self.shape else 1
        rows = range(size) if rows is None else rows
        values = self.load(range(min(rows.start, size), min(rows.stop, size)), columns)
        missing = max(0, rows.stop - max(rows.start, size))
        return join([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values

    def to(self, dtype: torch.dtype | None) -> TensorReader:
        """The tensor in another type, to which it is converted when it is read. None: as it is."""
        if dtype in (None, self.dtype):
            return self
        load = self.load
        return replace(self, dtype=dtype, load=lambda rows, cols: load(rows, cols).to(dtype))

    def first_rows(self, rows: int) -> TensorReader:
        """The first rows of the tensor; all of it if it has no more."""
        return replace(self, shape=(min(rows, self.shape[0]), *self.shape[1:]))


TensorReaders = Mapping[str, TensorReader]
"""Readers of tensors, by name of the tensor."""


def part_of(full: Tensor, rows: range, columns: Columns | None) -> Tensor:
    """Rows of a tensor, and of these the columns, concatenated."""
    part = full[rows.start : rows.stop] if full.dim() else full
    if columns is None:
        return part
    dim, ranges = columns
    return join([part.narrow(dim, span.start, len(span)) for span in ranges], dim)


def join(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


class StateReader(Protocol):
    """Weights and optimizer states of a checkpoint by canonical name, whatever its layout was.

    States of layers are read as weights that have no optimizer states.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each full parameter, and of each state of a layer."""

    @property
    def counters(self) -> Mapping[str, int]:
        """DeepSpeed's counters of the run, by attribute of its engine."""

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's loss scaler; None if there was none."""

    def state_names(self, name: str) -> tuple[str, ...]:
        """Kinds of the optimizer's states of a parameter, MASTER and the steps excluded."""

    def steps(self, name: str) -> int | None:
        """Number of steps in the optimizer's state of a parameter; None if it has none."""

    def tensor(self, name: str, key: str) -> TensorReader:
        """The full tensor of one kind of state of a parameter."""


def full_shape(
    shape: Sequence[int], spec: ShardSpec | None, num_expert_ranks: int
) -> tuple[int, ...]:
    """The shape of a full parameter."""
    full = [shape[0] * num_expert_ranks, *shape[1:]]
    if spec is not None:
        full[spec.dim] = sum(spec.sections)
    return tuple(full)
