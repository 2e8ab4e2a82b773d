"""Weights of a checkpoint as full tensors under their canonical names.

Reads the files of any ZeRO stage, tensor-, pipeline- and expert-parallel size, and loads them into
a model of any tensor-parallel size, one parameter at a time: files are memory-mapped, and at most
one full parameter exists besides the model. Knows DeepSpeed's file names and no engines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    CheckpointMetadata,
    ParallelLayout,
    read_manifest,
)
from megatron_ds.checkpoint.universal.folders import FP32
from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed.expert_files import expert_file
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.engine.states.state_reader import VOCABULARY_TABLES, TensorReader
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.parallel.sharding import ShardSpec, shard_spec, take_shard, unshard

Weights = dict[str, torch.Tensor]
NamedShards = Iterator[tuple[str, TensorReader]]


def files_with_weights(found: CheckpointMetadata) -> dict[str, FileRecord]:
    """The files that a reader of the weights needs; none if the checkpoint has no checksums."""
    if not (found.path / MANIFEST).is_file():  # DeepSpeed's converter writes none
        return {}
    files = read_manifest(found.path)
    if found.is_universal:
        return {name: record for name, record in files.items() if Path(name).stem == FP32}
    without = () if found.run.layout.zero_stage == 3 else ("optim_states.pt",)
    return {name: record for name, record in files.items() if not name.endswith(without)}


def lazy_full_weights(found: CheckpointMetadata) -> NamedShards:
    """Opens every parameter as a full tensor on the CPU, which is read on demand.

    Yields:
        Canonical name and tensor: fp32 for ZeRO-3, otherwise in the precision of the run.

    Raises:
        ValueError: For a file with anything but tensors and plain values.
    """
    layout = found.run.layout
    tp_size = layout.tensor_model_parallel_size
    readers = [_iter_zero3_shards if layout.zero_stage == 3 else _iter_zero012_shards]
    if found.run.experts:
        readers.append(_iter_experts)
    done = set()
    for stage in range(layout.pipeline_model_parallel_size):
        ranks = range(stage * tp_size, (stage + 1) * tp_size)
        shards_of = [chain(*(read(found.path, rank, layout) for read in readers)) for rank in ranks]
        for rows in zip(*shards_of, strict=True):
            (name,) = {name for name, _ in rows}
            if name in done:  # the last stage's copy of a tied embedding
                continue
            done.add(name)
            shards = [shard for _, shard in rows]
            spec = found.run.shards.get(name)
            if spec is None:
                yield name, shards[0]
            else:
                yield name, _unsharded(shards, ShardSpec(spec.dim, spec.sections))


def _unsharded(shards: Sequence[TensorReader], spec: ShardSpec) -> TensorReader:
    shape = list(shards[0].shape)
    shape[spec.dim] = sum(spec.sections)

    def read() -> torch.Tensor:
        return unshard([shard.read() for shard in shards], spec)

    return TensorReader.full(tuple(shape), shards[0].dtype, read)


def load_full_weights(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], rank: int, size: int
) -> None:
    """Copies full tensors into a model's parameters, each tensor-parallel rank its shard.

    A vocabulary table that was padded to another number of rows is truncated or padded with zeros.

    Args:
        model: Model of tensor-parallel rank `rank` of `size`.
        weights: Canonical names and full tensors.
        rank: Tensor-parallel rank.
        size: Tensor-parallel size.

    Raises:
        UserError: If names or shapes do not fit; the model's values are then undefined.
    """
    parameters = dict(model.named_parameters())
    unknown = []
    for name, full in weights:
        parameter = parameters.pop(name, None)
        if parameter is None:
            unknown.append(name)
        else:
            _load_one(name, parameter, full, rank, size)
    if parameters or unknown:
        raise user_error(
            "weights-names-mismatch", parameters=sorted(parameters), unknown=sorted(unknown)
        )


def _load_one(name: str, parameter: nn.Parameter, full: torch.Tensor, rank: int, size: int) -> None:
    spec = shard_spec(parameter)
    expected = list(parameter.shape)
    if spec is not None:
        expected[spec.dim] = sum(spec.sections)
    if name in VOCABULARY_TABLES:
        # A negative number of rows to append truncates.
        full = nn.functional.pad(full, (0, 0, 0, expected[0] - len(full)))
    if list(full.shape) != expected:
        raise user_error(
            "weights-shape-mismatch", name=name, shape=list(full.shape), expected=expected
        )
    with torch.no_grad():
        parameter.copy_(full if spec is None else take_shard(full, spec, rank, size))


def _iter_zero012_shards(path: Path, rank: int, layout: ParallelLayout) -> NamedShards:
    """ZeRO 0 to 2: one file per model-parallel rank contains its weights."""
    module = _read(path / f"mp_rank_{rank:02d}_model_states.pt")["module"]
    for name, value in module.items():
        yield name, TensorReader.of(value)


def _iter_zero3_shards(path: Path, tp_rank: int, layout: ParallelLayout) -> NamedShards:
    """ZeRO 3: fp32 partitions of each flattened parameter, one per data-parallel rank."""
    num_ranks = layout.data_parallel_size * layout.ds_sequence_parallel_size
    stems = [f"zero_pp_rank_{rank}_mp_rank_{tp_rank:02d}" for rank in range(num_ranks)]
    shapes = _read(path / f"{stems[0]}_model_states.pt")["param_shapes"]
    prefix = "bf16_" if layout.precision == "bf16" else ""
    files = [path / f"{prefix}{stem}_optim_states.pt" for stem in stems]
    flats = [_read(file)["optimizer_state_dict"]["fp32_flat_groups"] for file in files]
    yield from zero3_parameters(shapes, flats)


def zero3_parameters(
    shapes: Iterable[Mapping[str, torch.Size]], flats: Sequence[Sequence[torch.Tensor]]
) -> NamedShards:
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

    index = offset = 0  # the flat tensor and the place in it, the same on every rank
    for name, shape in (item for group in shapes for item in group.items()):
        size = -(-shape.numel() // num_ranks)
        while offset + size > flats[0][index].numel():
            index, offset = index + 1, 0
        read_one = functools.partial(read, index, offset, size, shape)
        yield name, TensorReader.full(tuple(shape), torch.float32, read_one)
        offset += size


def _iter_experts(path: Path, tp_rank: int, layout: ParallelLayout) -> NamedShards:
    """The experts of all expert-parallel ranks, each of which has a file of its own.

    A pipeline stage without experts has no files.
    """
    paths = [path / expert_file(rank, tp_rank) for rank in range(layout.expert_model_parallel_size)]
    files = [_read(file) for file in paths if file.exists()]
    for name, first in files[0].items() if files else ():
        shape = (sum(len(file[name]) for file in files), *first.shape[1:])
        parts = [file[name] for file in files]
        yield name, TensorReader.full(shape, first.dtype, functools.partial(torch.cat, parts))


def _read(path: Path) -> Any:
    return read_tensors(path, mmap=True)
