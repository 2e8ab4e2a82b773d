"""Computes on full matrices whose elements ZeRO and tensor parallelism spread over the ranks.

Every matrix has one owner among the data- and tensor-parallel ranks. Its pieces are sent to the
owner, first within the data-parallel groups and then within the tensor-parallel ones; the owner
computes, and the results return the same way. Each rank sends and receives about as many
elements as its partition has, and computes its share of the matrices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ds.engine.deepspeed.partitions import ParameterPlace, read_partitions
from megatron_ds.engine.readback import master_weights
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.sharding import declaration, expert_group, shard_spec, take_shard, unshard
from megatron_ds.parallel.weights import Role, ShardSpec


class Owner(NamedTuple):
    """Ranks in the data- and in the tensor-parallel group."""

    dp: int
    tp: int


@dataclass(frozen=True)
class MatrixShard:
    """A parameter of one matrix or of several, and the part of it that this rank updates."""

    shape: tuple[int, ...]
    """Shape of this tensor-parallel rank's shard; three-dimensional if matrices are stacked."""
    spec: ShardSpec | None
    """Sharding over the tensor-parallel ranks; None if the parameter is replicated."""
    master: Tensor
    """Tensor of the optimizer that holds the elements."""
    place: slice
    """The elements, in the flattened tensor."""
    sent: tuple[range, ...]
    """Elements of the flattened shard that each data-parallel rank sends to the owner."""
    kept: tuple[range, ...]
    """Elements of the flattened shard that each data-parallel rank updates."""
    owner: Owner
    fused: ShardSpec | None = None
    """The declared sections of its matrices. None: `spec`."""

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of the fused matrices, in each stacked matrix; empty for one."""
        rows = len(self.shape) - 2
        spec = self.fused or self.spec
        return spec.sections if spec is not None and spec.dim == rows else ()


class DistributedMatrices:
    """The matrices of some tensors of an optimizer.

    Args:
        pieces: All matrices, in the same order on every rank.
        dp: Group over which ZeRO partitions.
        tp: Tensor-parallel group.
        empty: Tensor without elements of the type and on the device of the computation.
    """

    def __init__(self, pieces: Sequence[MatrixShard], dp: Group, tp: Group, empty: Tensor) -> None:
        self.pieces = pieces
        self._dp = dp
        self._tp = tp
        self._empty = empty
        self._in_row = [piece for piece in pieces if piece.owner.dp == dp.rank]
        """Matrices whose owners are tensor-parallel ranks of this one."""
        self.owned = [piece for piece in self._in_row if piece.owner.tp == tp.rank]
        """Matrices of which this rank is the owner."""

    def collect(
        self, values_of: Callable[[MatrixShard], Tensor], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """The full matrices that this rank owns. Collective.

        Args:
            values_of: This rank's elements of a matrix, one-dimensional.
            dtype: Data type in which they are sent. None: the type of the computation.
        """
        dp = self._dp
        tp = self._tp
        empty = self._empty.to(dtype or self._empty.dtype)
        queues = _transfer(
            [
                [
                    values_of(p).to(empty)
                    for p in self.pieces
                    if p.owner.dp == rank and p.sent[dp.rank]
                ]
                for rank in range(dp.size)
            ],
            [[len(p.sent[rank]) for p in self._in_row if p.sent[rank]] for rank in range(dp.size)],
            dp,
            empty,
        )
        shards = [
            torch.cat([next(queues[rank]) for rank in range(dp.size) if piece.sent[rank]])
            for piece in self._in_row
        ]

        def is_sent(piece: MatrixShard, rank: int) -> bool:
            return piece.spec is not None or rank == piece.owner.tp

        queues = _transfer(
            [
                [
                    shard
                    for piece, shard in zip(self._in_row, shards, strict=True)
                    if piece.owner.tp == rank and is_sent(piece, tp.rank)
                ]
                for rank in range(tp.size)
            ],
            [[_numel(p) for p in self.owned if is_sent(p, rank)] for rank in range(tp.size)],
            tp,
            empty,
        )
        full = []
        for piece in self.owned:
            senders = [rank for rank in range(tp.size) if is_sent(piece, rank)]
            parts = [next(queues[rank]).view(piece.shape) for rank in senders]
            full.append(parts[0] if piece.spec is None else unshard(parts, piece.spec))
        return full

    def distribute(
        self, matrices: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[MatrixShard, Tensor]]:
        """Send full matrices of the owners to the ranks that update them. Collective.

        Args:
            matrices: Matrices that this rank owns.
            dtype: Their data type. None: the type of the computation.

        Yields:
            Each matrix with elements that this rank updates, and the values of them.
        """
        dp = self._dp
        tp = self._tp
        empty = self._empty.to(dtype or self._empty.dtype)
        results: list[list[Tensor]] = [[] for _ in range(tp.size)]
        for piece, matrix in zip(self.owned, matrices, strict=True):
            for rank, values in enumerate(results):
                spec = piece.spec
                shard = matrix if spec is None else take_shard(matrix, spec, rank, tp.size)
                values.append(shard.flatten())
        queues = _transfer(
            results,
            [[_numel(p) for p in self._in_row if p.owner.tp == rank] for rank in range(tp.size)],
            tp,
            empty,
        )
        shards = [(piece, next(queues[piece.owner.tp])) for piece in self._in_row]
        queues = _transfer(
            [
                [
                    shard[p.kept[rank].start : p.kept[rank].stop]
                    for p, shard in shards
                    if p.kept[rank]
                ]
                for rank in range(dp.size)
            ],
            [
                [
                    len(p.kept[dp.rank])
                    for p in self.pieces
                    if p.owner.dp == rank and p.kept[dp.rank]
                ]
                for rank in range(dp.size)
            ],
            dp,
            empty,
        )
        for piece in self.pieces:
            if piece.kept[dp.rank]:
                yield piece, next(queues[piece.owner.dp])


def _numel(piece: MatrixShard) -> int:
    return math.prod(piece.shape)


def _transfer(
    parts: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], group: Group, empty: Tensor
) -> list[Iterator[Tensor]]:
    """Send tensors to each rank of a group and receive those that they send. Collective.

    Args:
        parts: One-dimensional tensors for each rank.
        sizes: Sizes of the tensors that each rank sends.
        group: The group.
        empty: Tensor of the type and device of all of them.
    """
    if group.size == 1:
        return [iter(parts[0])]
    sent = torch.cat([empty, *(tensor for tensors in parts for tensor in tensors)])
    counts = [sum(tensor.numel() for tensor in tensors) for tensors in parts]
    expected = [sum(lengths) for lengths in sizes]
    received = empty.new_empty(sum(expected))
    dist.all_to_all_single(received, sent, expected, counts, group=group.handle)
    return [
        iter(values.split(list(lengths)) if lengths else ())
        for values, lengths in zip(received.split(expected), sizes, strict=True)
    ]


def find_matrices(
    engine: Any, stage: int, mesh: Mesh, empty: Tensor
) -> Iterator[DistributedMatrices]:
    """The matrices of an engine, by the tensors that its optimizer steps at once.

    Args:
        engine: Engine of `deepspeed.initialize`.
        stage: ZeRO stage.
        mesh: Mesh of this process.
        empty: See `DistributedMatrices`.
    """
    parameters = dict(engine.module.named_parameters())
    tp = mesh.tp
    for partition, masters in zip(
        read_partitions(engine, stage), _masters(engine, stage), strict=True
    ):
        places = [
            entry
            for entry in partition.parameters
            if declaration(entry.name, parameters[entry.name]).role is Role.MATRIX
        ]
        # All parameters of a flat tensor are partitioned over the same ranks.
        is_expert = any(expert_group(parameters[entry.name]) is not None for entry in places)
        dp = mesh.expert_dp if is_expert else mesh.replicas
        owners = assign_owners([entry.shape for entry in places], dp.size, tp.size)
        pieces = []
        for entry, owner in zip(places, owners, strict=True):
            parameter = parameters[entry.name]
            kept = _kept(entry, stage, partition.size, dp.size)
            start = 0 if stage == 0 else _own_offset(entry, stage, partition.size, dp.rank)
            pieces.append(
                MatrixShard(
                    shape=entry.shape,
                    spec=_spec(parameter, entry.shape, tp.size),
                    master=parameter if stage == 0 else masters[0],
                    place=slice(start, start + len(kept[dp.rank])),
                    # Without ZeRO every rank has the complete shard.
                    sent=tuple(
                        span if stage or rank == owner.dp else range(0)
                        for rank, span in enumerate(kept)
                    ),
                    kept=kept,
                    owner=owner,
                    fused=declaration(entry.name, parameter).shard,
                )
            )
        yield DistributedMatrices(pieces, dp, tp, empty)


def _spec(parameter: nn.Parameter, shape: tuple[int, ...], tp_size: int) -> ShardSpec | None:
    """The sharding of a parameter. Tensor-parallel ranks with different experts shard the experts
    of one expert-parallel rank."""
    spec = shard_spec(parameter)
    is_whole = spec is not None and spec.dim == 0 and len(shape) > 2
    return ShardSpec(0, (shape[0] * tp_size,)) if is_whole else spec


def _masters(engine: Any, stage: int) -> list[list[Tensor]]:
    """The tensors that the optimizer steps at once, in the order of `read_partitions`."""
    if stage == 0:
        return [list(group["params"]) for group in engine.basic_optimizer.param_groups]
    return [[flat] for flat in master_weights(engine)]


def _kept(entry: ParameterPlace, stage: int, size: int, dp_size: int) -> tuple[range, ...]:
    """The elements of a parameter's shard that each data-parallel rank has."""
    numel = math.prod(entry.shape)
    if stage == 0:
        return (range(numel),) * dp_size
    first, length = (-entry.offset, size) if stage < 3 else (0, -(-numel // dp_size))
    bounds = [min(numel, max(0, first + rank * length)) for rank in range(dp_size + 1)]
    return tuple(range(*pair) for pair in itertools.pairwise(bounds))


def _own_offset(entry: ParameterPlace, stage: int, size: int, dp_rank: int) -> int:
    return entry.offset if stage == 3 else max(0, entry.offset - dp_rank * size)


def assign_owners(shapes: Sequence[tuple[int, ...]], dp_size: int, tp_size: int) -> list[Owner]:
    """Spread parameters over the ranks: each, from the largest, to the one with the least work."""
    work = {Owner(dp, tp): 0 for dp in range(dp_size) for tp in range(tp_size)}
    owners: dict[int, Owner] = {}
    for index in sorted(range(len(shapes)), key=lambda index: -math.prod(shapes[index])):
        owners[index] = min(work, key=lambda owner: work[owner])
        work[owners[index]] += math.prod(shapes[index]) * min(shapes[index][-2:])
    return [owners[index] for index in range(len(shapes))]
