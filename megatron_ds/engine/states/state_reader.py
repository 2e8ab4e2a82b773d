"""The interface between an engine and checkpoints of other layouts: states by canonical name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron_ds.parallel.sharding import ShardSpec

MASTER = "master"
"""Kind of state: the weights that the optimizer steps. Other kinds have the optimizer's names."""
VOCABULARY_TABLES = ("embedding.word.weight", "head.weight")
"""Tables whose rows are padded with zeros to a number that depends on the layout."""


class FullStates(Protocol):
    """Weights and optimizer states of a checkpoint by canonical name, whatever its layout was."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each full parameter."""

    @property
    def counters(self) -> Mapping[str, int]:
        """DeepSpeed's counters of the run, by attribute of its engine."""

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's loss scaler; None if there was none."""

    def moments(self, name: str) -> tuple[str, ...]:
        """Kinds of the optimizer's states of a parameter, MASTER and the steps excluded."""

    def steps(self, name: str) -> int | None:
        """Number of steps in the optimizer's state of a parameter; None if it has none."""

    def read(
        self, name: str, kind: str, rows: range, columns: tuple[int, Sequence[range]] | None = None
    ) -> Tensor:
        """Read part of a full tensor; may be a view of a file.

        Args:
            name: Parameter.
            kind: Kind of state.
            rows: Indices of dimension 0.
            columns: Another dimension and indices of it; None: all.
        """


def full_shape(
    shape: Sequence[int], spec: ShardSpec | None, num_expert_ranks: int
) -> tuple[int, ...]:
    """The shape of a full parameter."""
    full = list(shape)
    if spec is not None:
        full[spec.dim] = sum(spec.sections)
    full[0] *= num_expert_ranks
    return tuple(full)
