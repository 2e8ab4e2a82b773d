"""Weights of a native checkpoint as whole tensors under their canonical names.

Reads what any ZeRO stage and any tensor-parallel size wrote, and gives a model of any
tensor-parallel size its part, one parameter at a time: the files are mapped into memory, and no
more than one whole parameter is held beside the model. Knows DeepSpeed's file names and nothing of
engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from megatron_ds.checkpoint.metadata import CheckpointMetadata, read_manifest
from megatron_ds.engine.ds_checkpoint_io import read_tensors
from megatron_ds.parallel.sharding import ShardSpec, shard_spec, take_shard, unshard

Weights = dict[str, torch.Tensor]
VOCABULARY_TABLES = ("embedding.word.weight", "head.weight")
"""Their rows are padded, to a number that depends on the tensor-parallel size."""


def files_with_weights(found: CheckpointMetadata) -> list[str]:
    """The files that hold weights, or say how they are cut."""
    without = () if found.run["layout"]["zero_stage"] == 3 else ("optim_states.pt",)
    return [name for name in read_manifest(found.path) if not name.endswith(without)]


def read_weights(found: CheckpointMetadata) -> Weights:
    """Every parameter, whole, on the CPU: fp32 after ZeRO-3, else in the run's precision."""
    return dict(iter_full_weights(found))


def iter_full_weights(found: CheckpointMetadata) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_weights`, one after the other."""
    layout = found.run["layout"]
    open_part: type[_Zero3Reader] | type[_Zero012Reader] = (
        _Zero3Reader if layout["zero_stage"] == 3 else _Zero012Reader
    )
    parts: list[_TpShardReader] = [
        open_part(found.path, rank, layout) for rank in range(layout["tensor_model_parallel_size"])
    ]
    for name in parts[0].names:
        shards = [part.read(name) for part in parts]
        entry = found.run["shards"].get(name)
        if entry is None:
            yield name, shards[0]
        else:
            yield name, unshard(shards, ShardSpec(entry["dim"], tuple(entry["sections"])))


def load_full_weights(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], rank: int, size: int
) -> None:
    """Copies whole tensors into a model's parameters, each rank its part.

    A table of the vocabulary that was padded to another size is cut or padded with zeros. Raises
    ValueError if names or shapes do not fit; the model's values are then undefined.
    """
    parameters = dict(model.named_parameters())
    unknown = []
    for name, full in weights:
        parameter = parameters.pop(name, None)
        if parameter is None:
            unknown.append(name)
        else:
            _put(name, parameter, full, rank, size)
    if parameters or unknown:
        raise ValueError(
            f"weights do not fit: missing {sorted(parameters)}, unknown {sorted(unknown)}"
        )


def _put(name: str, parameter: nn.Parameter, full: torch.Tensor, rank: int, size: int) -> None:
    spec = shard_spec(parameter)
    expected = list(parameter.shape)
    if spec is not None:
        expected[spec.dim] = sum(spec.sections)
    if name in VOCABULARY_TABLES:
        full = _with_rows(full, expected[0])
    if list(full.shape) != expected:
        raise ValueError(f"{name} is {list(full.shape)}, the model expects {expected}")
    with torch.no_grad():
        parameter.copy_(full if spec is None else take_shard(full, spec, rank, size))


def _with_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """A table of the vocabulary with more or less padding at its end."""
    if table.shape[0] >= rows:
        return table[:rows]
    return torch.cat([table, table.new_zeros(rows - table.shape[0], *table.shape[1:])])


class _TpShardReader(Protocol):
    """What one tensor-parallel rank saved."""

    names: list[str]

    def read(self, name: str) -> torch.Tensor:
        """This rank's part of a parameter."""
        ...


class _Zero012Reader:
    """ZeRO 0 to 2: one file per tensor-parallel rank holds its weights."""

    def __init__(self, path: Path, tp_rank: int, layout: dict[str, Any]) -> None:
        saved = _read(path / f"mp_rank_{tp_rank:02d}_model_states.pt")
        self._module: Weights = saved["module"]
        self.names = list(self._module)

    def read(self, name: str) -> torch.Tensor:
        return self._module[name]


class _Zero3Reader:
    """ZeRO 3: every data-parallel rank holds an equal slice of each flattened parameter, padded at
    the end, one parameter after the other, in fp32. The slices lie in several tensors, none across
    two of them.
    """

    def __init__(self, path: Path, tp_rank: int, layout: dict[str, Any]) -> None:
        dp_size = layout["data_parallel_size"]
        stems = [f"zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}" for rank in range(dp_size)]
        groups = _read(path / f"{stems[0]}_model_states.pt")["param_shapes"]
        self._shapes: dict[str, torch.Size] = {
            name: shape for group in groups for name, shape in group.items()
        }
        self.names = list(self._shapes)
        prefix = "bf16_" if layout["precision"] == "bf16" else ""
        states = (_read(path / f"{prefix}{stem}_optim_states.pt") for stem in stems)
        self._flats: list[list[torch.Tensor]] = [
            state["optimizer_state_dict"]["fp32_flat_groups"] for state in states
        ]
        self._places = self._find_places(dp_size)

    def _find_places(self, dp_size: int) -> dict[str, tuple[int, int, int]]:
        """Tensor, offset and size of each parameter's slices, the same on every rank."""
        sizes = [flat.numel() for flat in self._flats[0]]
        places, index, offset = {}, 0, 0
        for name, shape in self._shapes.items():
            size = -(-shape.numel() // dp_size)
            while offset + size > sizes[index]:
                index, offset = index + 1, 0
            places[name] = (index, offset, size)
            offset += size
        return places

    def read(self, name: str) -> torch.Tensor:
        index, offset, size = self._places[name]
        shape = self._shapes[name]
        whole = torch.cat([flats[index][offset : offset + size] for flats in self._flats])
        return whole[: shape.numel()].view(shape)


def _read(path: Path) -> Any:
    return read_tensors(path, mmap=True)
