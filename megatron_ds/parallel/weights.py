"""Declarations of weights: name, shape, sharding, initial values and what training does with them.

A module is built from its declared weights, and parameters are counted from them. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum

from megatron_ds.config.problems import user_error
from megatron_ds.dataclass import dataclass

QUERY_KEY_VALUE = ("query", "key", "value")
GATE = "gate"
GATE_UP = ("gate", "up")
"""Names of the parts of fused matrices, in their order."""


@dataclass(frozen=True)
class ShardSpec:
    """Sharding along one dimension, made of sections that are each split evenly over the ranks.

    Rank i holds the concatenation of the i-th slice of every section: of a fused [Q; K; V] or
    [gate; up] matrix, every rank has its slice of each part.
    """

    dim: int
    sections: tuple[int, ...]
    """Sizes along `dim`; their sum is the full size."""
    parts: tuple[str, ...] = ()
    """Names of the sections, such as "query", "key", "value"; empty if there is only one."""

    def __post_init__(self) -> None:
        assert not self.parts or len(self.parts) == len(self.sections)

    def check(self, size: int) -> None:
        """Raises:
        UserError: If a section cannot be split evenly over `size` ranks.
        """
        for section in self.sections:
            if section % size:
                raise user_error(
                    "section-not-divisible-by-tensor-parallel-size", section=section, size=size
                )

    def ranges(self, rank: int, size: int) -> list[range]:
        """Indices along `dim` that `rank` of `size` holds, one range per section."""
        self.check(size)
        ranges = []
        start = 0
        for section in self.sections:
            local = section // size
            ranges.append(range(start + rank * local, start + (rank + 1) * local))
            start += section
        return ranges

    def locate(self, indices: range, size: int) -> Iterator[tuple[int, range]]:
        """Locates indices along `dim` on `size` ranks.

        Yields:
            Rank, and indices in its shard, in the order of `indices`.
        """
        self.check(size)
        position = indices.start
        start = 0
        local_start = 0
        for section in self.sections:
            local = section // size
            while start <= position < min(start + section, indices.stop):
                rank, offset = divmod(position - start, local)
                count = min(local - offset, indices.stop - position)
                yield rank, range(local_start + offset, local_start + offset + count)
                position += count
            start += section
            local_start += local

    def full_indices(self, indices: range, rank: int, size: int) -> list[range]:
        """Indices along `dim` of the full tensor, for indices in the shard of `rank` of `size`."""
        parts = []
        local_start = 0
        for full in self.ranges(rank, size):
            start = max(indices.start - local_start, 0)
            parts.append(full[start : max(indices.stop - local_start, start)])
            local_start += len(full)
        return [part for part in parts if part]


class Role(StrEnum):
    """Role of a weight in training and checkpoints."""

    MATRIX = "matrix of a layer"
    """Decayed; a matrix of a layer, which optimizers of matrices update as such."""
    VECTOR = "bias, or weight of a norm"
    """Not decayed."""
    POSITIONS = "learned positions"
    """Decayed as an embedding."""
    WORDS = "word embedding"
    """Decayed as an embedding, with the learning rate of --decoupled-lr."""
    OUTPUT = "output layer"
    """Decayed, with the learning rate of --decoupled-lr."""
    STATE = "state of a layer"
    """No parameter: every rank has all of it in fp32, and no optimizer updates it."""
    OUTPUT_BIAS = "bias of the output layer"
    """Not decayed."""


VOCABULARY = (Role.WORDS, Role.OUTPUT, Role.OUTPUT_BIAS)
"""Roles of tables whose rows are padded with zeros to a number that depends on the layout."""


class Width(StrEnum):
    """Size of the model that grows with its width, for muP."""

    HIDDEN = "hidden size"
    HEADS = "heads times their dimension"
    FEED_FORWARD = "feed-forward size"
    LATENT = "size of latent vectors"


FIXED = None
"""A dimension that does not grow with the width: tokens, positions, experts."""


class Partial(StrEnum):
    """Condition for each tensor-parallel rank to compute part of a replicated weight's gradient."""

    NEVER = "never"
    SEQUENCE = "with sequence parallelism"
    """The weight acts on this rank's tokens."""
    ALWAYS = "always"
    """The weight acts on this rank's heads, or another sharded dimension."""


@dataclass(frozen=True)
class Weight:
    """One weight of the model."""

    name: str
    """Canonical name, or the part of it below a module."""
    shape: tuple[int, ...]
    """Full shape."""
    shard: ShardSpec | None = None
    """Sharding over tensor-parallel ranks. None: it is replicated."""
    std: float = 0.0
    """Standard deviation of the initial values."""
    mean: float = 0.0
    """Mean of the initial values."""
    is_uniform: bool = False
    """Whether they are drawn from a uniform distribution, not a normal one."""
    role: Role = Role.MATRIX
    partial_over: Partial = Partial.NEVER
    """Condition for summing its gradient over the tensor-parallel ranks."""
    is_stacked: bool = False
    """Whether dimension 0 counts experts, which expert-parallel ranks share."""
    padding: int = 0
    """Rows at the end that are zero and no tokens."""
    lr_scale: float = 1.0
    """Factor of the learning rate."""
    widths: tuple[Width | None, ...] = ()
    """What each dimension of `shape` grows with in wider models; FIXED for the others. Every weight
    but states needs them for muP."""
    width_mult: float | None = None
    """Ratio of its number of inputs to that in the base model of muP, by which rates follow; its
    `std` follows already. None: there is no base model."""

    def size(self, tp_size: int, ep_size: int = 1, *, has_whole_experts: bool = False) -> int:
        """Elements on one rank, if tensor-parallel ranks have parts of experts or whole ones."""
        is_split = self.shard is not None or (has_whole_experts and self.is_stacked)
        ranks = (tp_size if is_split else 1) * (ep_size if self.is_stacked else 1)
        return math.prod(self.shape) // ranks


def linear_weights(
    name: str,
    shape: tuple[int, int],
    shard: ShardSpec | None,
    *,
    bias: bool,
    std: float,
    widths: tuple[Width | None, ...] = (),
) -> Iterator[Weight]:
    """The weights of a `ColumnParallelLinear`, a `RowParallelLinear` or a replicated layer.

    Args:
        name: Canonical name of the layer, or the part of it below a module.
        shape: Full shape of the matrix, [out, in].
        shard: Sharding of the rows or of the columns. None: all ranks have the matrix.
        bias: Whether there is a bias; it starts at zero.
        std: Standard deviation of the initial matrix.
        widths: What rows and columns grow with, see `Weight`.
    """
    yield Weight(f"{name}.weight", shape, shard, std, widths=widths)
    if bias:
        shared = shard if shard is not None and shard.dim == 0 else None
        yield Weight(f"{name}.bias", shape[:1], shared, role=Role.VECTOR, widths=widths[:1])
