"""Optimizer states in the files of Megatron-DeepSpeed with ZeRO or the bf16 optimizer.

    zero_pp_rank_D_mp_rank_XX_optim_states.pt    partition D of model-parallel rank XX

A partition is flat. Up to ZeRO 2, `param_slice_mappings` records where each part of a weight is;
with ZeRO 3, each rank has a part of every weight. Weights are named as DeepSpeed's engine names
them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.conversion.megatron.optimizer import MOMENTS, steps_of
from megatron_ds.engine.states.state_reader import MASTER, TensorReader

OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

States = dict[str, dict[str, list[TensorReader]]]
"""One tensor per tensor-parallel rank, by kind of state and by the weight's name."""


def read_states(
    folder: Path,
    weights: Mapping[str, Sequence[TensorReader]],
    rename: Callable[[str], str],
    read: Callable[[Path], Mapping[str, Any]],
) -> tuple[States, int | None, str]:
    """Opens the optimizer states of a folder.

    Args:
        folder: A `global_step*` folder.
        weights: The weights by name in the complete model, one for each tensor-parallel rank.
        rename: Gives a weight's name in the complete model.
        read: Reads a file.

    Returns:
        The states, the number of steps, and why there are none.
    """
    partitions: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        if match := OPTIMIZER_FILE.fullmatch(path.name):
            partitions[int(match[2])][int(match[1])] = path
    if not partitions:
        return {}, None, "it has no optimizer states, or they are not partitioned by ZeRO"
    kinds: States = {key: defaultdict(list) for key in (*MOMENTS, MASTER)}
    steps: int | None = None
    tp_size = max(map(len, weights.values()), default=1)
    for model_rank, paths in sorted(partitions.items()):
        tp_rank = model_rank % tp_size
        loaded = [read(paths[rank])["optimizer_state_dict"] for rank in sorted(paths)]
        if any("param_slice_mappings" not in state for state in loaded):
            return {}, None, "its optimizer states lack the places of the weights"
        for group in range(len(loaded[0]["param_slice_mappings"])):
            flats = [_flat_tensors(state, group) for state in loaded]
            if any(flat.keys() != kinds.keys() for flat in flats):
                return {}, None, "its optimizer states are not those of Adam"
            places = [state["param_slice_mappings"][group] for state in loaded]
            for saved in dict.fromkeys(name for mapping in places for name in mapping):
                name = rename(saved)
                if name not in weights or len(kinds[MASTER][name]) > tp_rank:
                    continue  # a stage's copy of another one's
                shape = weights[name][tp_rank].shape
                for key, tensors in kinds.items():
                    parts = [flat[key] for flat in flats]
                    read_one = partial(_read_weight, saved, shape, parts, places)
                    tensors[name].append(TensorReader.full(shape, torch.float32, read_one))
            base = loaded[0]["base_optimizer_state"]
            steps = steps_of(base["param_groups"][group], base["state"][group]) or steps
    return {key: dict(tensors) for key, tensors in kinds.items()}, steps, ""


def zero3_states(
    files: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, list[list[Tensor]]], int | None, str]:
    """Opens the flat tensors of ZeRO 3.

    Args:
        files: Optimizer states of each data-parallel rank.

    Returns:
        The flat tensors of each rank by kind, master weights always; the number of steps; why the
        other states are not read.
    """
    partitions = {MASTER: [list(file["fp32_flat_groups"]) for file in files]}
    inner = [file.get("optimizer_state_dict") or {} for file in files]
    numbers = range(len(partitions[MASTER][0]))
    states = [[state.get("state", {}).get(index, {}) for index in numbers] for state in inner]
    for key in MOMENTS:
        if not all(key in state for rank in states for state in rank):
            return partitions, None, "its optimizer states are not those of Adam"
        partitions[key] = [[state[key] for state in rank] for rank in states]
    groups = inner[0].get("param_groups") or [{}]
    steps = steps_of(groups[0], states[0][0])
    return partitions, steps, "" if steps is not None else "it does not contain the number of steps"


def zero3_parameters(
    shapes: Iterable[Mapping[str, torch.Size]], flats: Sequence[Sequence[torch.Tensor]]
) -> Iterator[tuple[str, TensorReader]]:
    """The parameters that ZeRO 3 has partitioned over data-parallel ranks.

    The partitions have equal sizes; the last one is padded. They are concatenated in several flat
    tensors, and none spans two of these.

    Args:
        shapes: Shapes by name, in the order of the partitions, for each optimizer group.
        flats: The flat tensors of each rank.
    """
    num_ranks = len(flats)

    def read(index: int, offset: int, size: int, shape: torch.Size) -> torch.Tensor:
        full = torch.cat([flat[index][offset : offset + size] for flat in flats])
        return full[: shape.numel()].view(shape)

    index = 0  # of the flat tensor
    offset = 0  # in the flat tensor, the same on every rank
    for name, shape in (item for group in shapes for item in group.items()):
        size = -(-shape.numel() // num_ranks)
        while offset + size > flats[0][index].numel():
            index += 1
            offset = 0
        read_one = partial(read, index, offset, size, shape)
        yield name, TensorReader.full(tuple(shape), torch.float32, read_one)
        offset += size


def _flat_tensors(loaded: Mapping[str, Any], group: int) -> dict[str, Tensor]:
    """The flat tensors of one group of one partition, by kind."""
    base = loaded["base_optimizer_state"]
    state = base["state"].get(group, {}) if isinstance(base, Mapping) and "state" in base else {}
    tensors = {key: state[key] for key in MOMENTS if key in state}
    return {**tensors, MASTER: loaded["single_partition_of_fp32_groups"][group]}


def _read_weight(
    name: str, shape: tuple[int, ...], flats: Sequence[Tensor], places: Sequence[Mapping[str, Any]]
) -> Tensor:
    parts = []
    for flat, mapping in zip(flats, places, strict=True):
        if name in mapping:
            span = mapping[name].state
            parts.append(flat[span["start"] : span["start"] + span["numel"]])
    return torch.cat(parts).view(shape)
