"""The order of parameters in the flat tensors of DeepSpeed's optimizers.

A checkpoint holds the optimizer's states as flat tensors without names. They are right only for an
optimizer that has the same parameters at the same places, so checkpoints record the places as read
from the engine. Reads private attributes of the pinned DeepSpeed and changes nothing; imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """In the order of their offsets."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> FlatPartition:
        """Raises ValueError, TypeError or KeyError for anything but the plain values of one."""
        places = [
            ParameterPlace(str(name), tuple(map(int, shape)), int(offset))
            for name, shape, offset in values["parameters"]
        ]
        return cls(int(values["size"]), tuple(places))


def read_partitions(engine: Any, stage: int) -> list[FlatPartition]:
    """The flat tensors of an engine's optimizer, in the order in which they are saved.

    Args:
        engine: Engine of `deepspeed.initialize`.
        stage: ZeRO stage.
    """
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    partitions = []
    for size, places in _READERS[stage](engine):
        ordered = sorted(places, key=lambda place: place[1])
        partitions.append(
            FlatPartition(
                size,
                tuple(
                    ParameterPlace(names[id(parameter)], _shape(parameter), offset)
                    for parameter, offset in ordered
                ),
            )
        )
    return partitions


_Places = Iterator[tuple[int, list[tuple[Any, int]]]]
"""Size of each flat tensor, and its parameters with their offsets."""


def _replicated(engine: Any) -> _Places:
    """Stage 0: the states of each parameter are saved one after the other."""
    for group in engine.basic_optimizer.param_groups:
        sizes = [parameter.numel() for parameter in group["params"]]
        offsets = [sum(sizes[:index]) for index in range(len(sizes))]
        yield sum(sizes), list(zip(group["params"], offsets, strict=True))


def _partitioned_states(engine: Any) -> _Places:
    """Stages 1 and 2: the parameters are views of flat tensors."""
    optimizer = engine.optimizer
    kind = "bf16" if hasattr(optimizer, "bf16_groups") else "bit16"
    groups: Sequence[Any] = getattr(optimizer, f"{kind}_groups")
    flats = getattr(optimizer, f"{kind}_groups_flat")
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
"""By ZeRO stage."""


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))
