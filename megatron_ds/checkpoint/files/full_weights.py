"""Weights of a checkpoint as full tensors under their canonical names.

Reads the files of any ZeRO stage, tensor-, pipeline- and expert-parallel size, and loads them into
a model of any tensor-parallel size, one parameter at a time: files are memory-mapped, and at most
one full parameter exists besides the model. Knows DeepSpeed's file names and no engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from megatron_ds.checkpoint.metadata import MANIFEST, Checkpoint, ShardRecord, read_manifest
from megatron_ds.checkpoint.universal.folders import FP32
from megatron_ds.checkpoint.universal.reader import open_states
from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed.expert_files import expert_file
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, TensorReader
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.parallel.sharding import shard_spec, states_of, take_shard, unshard
from megatron_ds.parallel.weights import ShardSpec

Weights = dict[str, torch.Tensor]


def files_with_weights(checkpoint: Checkpoint) -> dict[str, FileRecord]:
    """The files that a reader of the weights needs; none if the checkpoint has no checksums."""
    if not (checkpoint.path / MANIFEST).is_file():  # DeepSpeed's converter writes none
        return {}
    files = read_manifest(checkpoint.path)
    if checkpoint.is_universal:
        return {name: record for name, record in files.items() if Path(name).stem == FP32}
    without = () if checkpoint.run.layout.zero_stage == 3 else ("optim_states.pt",)
    return {name: record for name, record in files.items() if not name.endswith(without)}


def lazy_full_weights(checkpoint: Checkpoint) -> dict[str, TensorReader]:
    """Opens every parameter as a full tensor on the CPU, which is read on demand.

    Returns:
        Tensors by canonical name: the fp32 master weights for ZeRO-3 and of a universal
        checkpoint, otherwise weights in the precision of the run.

    Raises:
        ValueError: For a file with anything but tensors and plain values.
    """
    layout = checkpoint.run.layout
    if layout.zero_stage == 3 or checkpoint.is_universal:
        states = open_states(checkpoint, has_optimizer=False)
        return {name: states.tensor(name, MASTER) for name in states.shapes}
    tp_size = layout.tensor_model_parallel_size
    weights: dict[str, TensorReader] = {}
    for stage in range(layout.pipeline_model_parallel_size):
        ranks = [_weights_of(checkpoint, stage * tp_size + rank) for rank in range(tp_size)]
        for name in ranks[0]:
            if name in weights:  # a stage's copy of a tied embedding
                continue
            shards = [rank[name] for rank in ranks]
            spec = checkpoint.run.shards.get(name)
            weights[name] = shards[0] if spec is None else _unsharded(shards, spec)
    return weights


def _weights_of(checkpoint: Checkpoint, model_rank: int) -> dict[str, TensorReader]:
    """The weights of a model-parallel rank without ZeRO 3, all its experts' included."""
    file = checkpoint.path / f"mp_rank_{model_rank:02d}_model_states.pt"
    module = read_tensors(file, mmap=True)["module"]
    weights = {name: TensorReader.of(value) for name, value in module.items()}
    num_files = checkpoint.run.layout.expert_model_parallel_size if checkpoint.run.experts else 0
    paths = [checkpoint.path / expert_file(rank, model_rank) for rank in range(num_files)]
    # A stage may have no experts.
    files = [read_tensors(path, mmap=True) for path in paths if path.exists()]
    for name, first in files[0].items() if files else ():
        parts = [file[name] for file in files]
        shape = (sum(map(len, parts)), *first.shape[1:])
        weights[name] = TensorReader.full(shape, first.dtype, partial(torch.cat, parts))
    return weights


def _unsharded(shards: Sequence[TensorReader], record: ShardRecord) -> TensorReader:
    spec = ShardSpec(record.dim, record.sections)
    shape = list(shards[0].shape)
    shape[spec.dim] = sum(spec.sections)

    def read() -> torch.Tensor:
        return unshard([shard.read() for shard in shards], spec)

    return TensorReader.full(tuple(shape), shards[0].dtype, read)


def load_full_weights(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], rank: int, size: int
) -> None:
    """Copies full tensors into a model's parameters, each tensor-parallel rank its shard, and
    states.

    A vocabulary table that was padded to another number of rows is truncated or padded with zeros.

    Args:
        model: Model of tensor-parallel rank `rank` of `size`.
        weights: Canonical names and full tensors.
        rank: Tensor-parallel rank.
        size: Tensor-parallel size.

    Raises:
        UserError: If names or shapes do not fit; the model's values are then undefined.
    """
    parameters: Weights = {**dict(model.named_parameters()), **states_of(model)}
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


def _load_one(name: str, parameter: torch.Tensor, full: torch.Tensor, rank: int, size: int) -> None:
    spec = shard_spec(parameter)
    expected = list(parameter.shape)
    if spec is not None:
        expected[spec.dim] = sum(spec.sections)
    if name in VOCABULARY_TABLES:
        # A negative number of rows to append truncates.
        columns = (0, 0) * (full.dim() - 1)
        full = nn.functional.pad(full, (*columns, 0, expected[0] - len(full)))
    if list(full.shape) != expected:
        raise user_error(
            "weights-shape-mismatch", name=name, shape=list(full.shape), expected=expected
        )
    with torch.no_grad():
        parameter.copy_(full if spec is None else take_shard(full, spec, rank, size))
