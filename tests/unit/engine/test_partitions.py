"""Where elements of parameters are in flat tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_ds.engine.deepspeed.partitions import ParameterPlace, locate

SIZES = (5, 12, 1, 7)


def flat_tensors(stage: int, num_ranks: int) -> tuple[list[torch.Tensor], int, list[int]]:
    """The flat tensor of each rank, its size, and the offsets; padding is -1."""
    parameters = [torch.arange(size) + 100 * number for number, size in enumerate(SIZES)]
    if stage == 3:
        parts = [-(-size // num_ranks) for size in SIZES]
        offsets = [sum(parts[:number]) for number in range(len(SIZES))]
        flats = [torch.full((sum(parts),), -1) for _ in range(num_ranks)]
        for parameter, part, offset in zip(parameters, parts, offsets, strict=True):
            for rank, values in enumerate(parameter.split(part)):
                flats[rank][offset : offset + len(values)] = values
        return flats, sum(parts), offsets
    offsets = [sum(SIZES[:number]) for number in range(len(SIZES))]
    size = -(-sum(SIZES) // num_ranks)
    padding = torch.full((size * num_ranks - sum(SIZES),), -1)
    return list(torch.cat([*parameters, padding]).split(size)), size, offsets


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_elements_are_located(stage: int, num_ranks: int) -> None:
    flats, size, offsets = flat_tensors(stage, num_ranks)
    for number, (numel, offset) in enumerate(zip(SIZES, offsets, strict=True)):
        place = ParameterPlace("name", (numel,), offset)
        for start, stop in itertools.combinations(range(numel + 1), 2):
            found = []
            for rank, position, elements in locate(
                place, size, stage, num_ranks, range(start, stop)
            ):
                found += flats[rank][position : position + len(elements)].tolist()
            assert found == [100 * number + element for element in range(start, stop)]


def test_without_zero_positions_are_those_in_the_parameter() -> None:
    place = ParameterPlace("name", (3, 4), 50)
    assert list(locate(place, 62, 0, 2, range(2, 9))) == [(0, 2, range(2, 9))]
