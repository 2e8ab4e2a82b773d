"""The order of parameters in the flat tensors of DeepSpeed's optimizers.

A checkpoint holds the optimizer's states as flat tensors without names. They are right only for an
optimizer that has the same parameters at the same places, so checkpoints record the places as read
from the engine. Reads private attributes of the pinned DeepSpeed and changes nothing; imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple


class ParameterPlace(NamedTuple):
    """A parameter in a flat tensor."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    """Shape on this tensor-parallel rank."""
    offset: int
    """Its first element: of the flat tensors of all data-parallel ranks one after the other or, at
    stage 3, where each rank has a part of each parameter, of a rank's own."""


@dataclass(frozen=True)
class FlatPartition:
    """One flat tensor of the optimizer."""

    size: int
    """Elements on each data-parallel rank, padding included."""
    parameters: tuple[ParameterPlace, ...]
    """Parameters of the partition, in the order of their offsets."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FlatPartition:
        """Raises ValueError, TypeError or KeyError for anything but the plain values of one."""
        places = [
            ParameterPlace(str(name), tuple(map(int, shape)), int(offset))
            for name, shape, offset in values["parameters"]
        ]
        return cls(int(values["size"]), tuple(places))


def locate(
    parameter: ParameterPlace, size: int, stage: int, num_ranks: int, elements: range
) -> Iterator[tuple[int, int, range]]:
    """Locates elements of a flattened parameter.

    Args:
        parameter: The parameter in a flat tensor.
        size: Elements of the flat tensor on each data-parallel rank.
        stage: ZeRO stage.
        num_ranks: Data-parallel ranks that the flat tensor is partitioned over.
        elements: Elements of the flattened parameter.

    Yields:
        Data-parallel rank, position of the first element in the rank's flat tensor (without ZeRO in
        the parameter itself), and the elements, in their order.
    """
    numel = math.prod(parameter.shape)
    before = parameter.offset if stage in (1, 2) else 0
    length = {0: numel, 3: -(-numel // num_ranks)}.get(stage, size)
    own_start = parameter.offset if stage == 3 else 0
    start = elements.start
    while start < elements.stop:
        rank, position = divmod(before + start, length)
        stop = min(elements.stop, start + length - position)
        yield rank, own_start + position, range(start, stop)
        start = stop


def read_partitions(engine: Any, stage: int) -> list[FlatPartition]:
    """The flat tensors of an engine's optimizer, in the order in which they are saved.

    Args:
        engine: Engine of `deepspeed.initialize`.
        stage: ZeRO stage.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    def place_of(parameter: Any, offset: int) -> ParameterPlace:
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        return ParameterPlace(names[id(parameter)], shape, offset)

    return [
        FlatPartition(size, tuple(place_of(*item) for item in sorted(places, key=itemgetter(1))))
        for size, places in _READERS[stage](engine)
    ]


_Places = Iterator[tuple[int, list[tuple[Any, int]]]]
"""Size of each flat tensor, and its parameters with their offsets."""


def _replicated(engine: Any) -> _Places:
    """Stage 0: the states are saved parameter by parameter."""
    for group in engine.basic_optimizer.param_groups:
        sizes = [parameter.numel() for parameter in group["params"]]
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        yield sum(sizes), list(zip(group["params"], offsets, strict=True))


def _partitioned_states(engine: Any) -> _Places:
    """Stages 1 and 2: the parameters are views of flat tensors."""
    optimizer = engine.optimizer
    prefix = "bf16" if hasattr(optimizer, "bf16_groups") else "bit16"
    groups: Sequence[Any] = getattr(optimizer, f"{prefix}_groups")
    flats = getattr(optimizer, f"{prefix}_groups_flat")
    for group, flat, ranks in zip(groups, flats, optimizer.real_dp_process_group, strict=True):
        places = [
            (parameter, (parameter.data_ptr() - flat.data_ptr()) // flat.element_size())
            for parameter in group
        ]
        yield flat.numel() // ranks.size(), places


def _partitioned_parameters(engine: Any) -> _Places:
    """Stage 3: each flat tensor holds this rank's part of each parameter of a sub-group."""
    optimizer = engine.optimizer
    for group in optimizer.fp16_groups:
        places = [
            (parameter, optimizer.grad_position[optimizer.get_param_id(parameter)][1])
            for parameter in group
        ]
        yield sum(parameter.partition_numel() for parameter in group), places


_READERS = (_replicated, _partitioned_states, _partitioned_states, _partitioned_parameters)
"""Readers of a rank's parameters and flat tensors, indexed by ZeRO stage."""
