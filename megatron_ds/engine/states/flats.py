"""Maps the flat tensors of this rank's optimizer to parameters, at every ZeRO stage."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megatron_ds.engine.deepspeed.partitions import ParameterPlace, locate, read_partitions
from megatron_ds.engine.readback import master_weights
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.sharding import expert_group


@dataclass(frozen=True)
class Part:
    """Elements of a parameter in a flat tensor of this rank."""

    place: ParameterPlace
    parameter: nn.Parameter
    position: int
    """Position of the first element in the flat tensor."""
    elements: range
    """Elements of this rank's flattened shard."""


@dataclass(frozen=True)
class Flat:
    """A tensor that the optimizer steps, and what it consists of."""

    master: Tensor
    names: tuple[str, ...]
    """Its parameters, on all data-parallel ranks."""
    parts: tuple[Part, ...]


def own_flats(engine: Any, stage: int, mesh: Mesh) -> Iterator[Flat]:
    """The flat tensors of this rank, without ZeRO one for each parameter.

    Args:
        engine: Engine of `deepspeed.initialize`.
        stage: ZeRO stage.
        mesh: Mesh of this process.
    """
    parameters = dict(engine.module.named_parameters())
    partitions = read_partitions(engine, stage)
    if stage == 0:
        for entry in (entry for part in partitions for entry in part.parameters):
            parameter = parameters[entry.name]
            everything = range(math.prod(entry.shape))
            yield Flat(parameter, (entry.name,), (Part(entry, parameter, 0, everything),))
        return
    for partition, master in zip(partitions, master_weights(engine), strict=True):
        parts = []
        for entry in partition.parameters:
            parameter = parameters[entry.name]
            ranks = replicas_of(parameter, mesh)
            everything = range(math.prod(entry.shape))
            places = locate(entry, partition.size, stage, ranks.size, everything)
            parts += [
                Part(entry, parameter, position, elements)
                for rank, position, elements in places
                if rank == ranks.rank
            ]
        names = tuple(entry.name for entry in partition.parameters)
        yield Flat(master, names, tuple(parts))


def replicas_of(parameter: nn.Parameter, mesh: Mesh) -> Group:
    """The ranks that have the same shard of a parameter, over which ZeRO partitions it."""
    return mesh.replicas if expert_group(parameter) is None else mesh.expert_dp
