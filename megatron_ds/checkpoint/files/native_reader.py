"""Weights and optimizer states of a checkpoint by canonical name, from the files of any layout.

Reads what is asked for from memory-mapped files, element by element: `run.json` records where each
parameter is in the optimizer's flat tensors, and how it is sharded. Knows DeepSpeed's file names
and no engines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.metadata import Checkpoint
from megatron_ds.engine.deepspeed.expert_files import expert_file
from megatron_ds.engine.deepspeed.partitions import FlatPartition, ParameterPlace, locate
from megatron_ds.engine.deepspeed.tensor_files import OPTIMIZER_KEYS, read_tensors
from megatron_ds.engine.states.state_reader import (
    MASTER,
    Columns,
    TensorReader,
    full_shape,
    join,
    part_of,
)
from megatron_ds.parallel.weights import ShardSpec

COUNTERS = ("global_steps", "global_samples", "skipped_steps")
OPTIMIZER_SETTINGS = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "zero_stage",
    "partition_count",
    "ds_version",
)
"""Entries of DeepSpeed's files that are not tensors."""


@dataclass(frozen=True)
class _Saved:
    """Place of the states of a parameter."""

    place: ParameterPlace
    partition: FlatPartition
    pp_rank: int
    group: int
    """Number of the flat tensor in its pipeline stage."""
    number: int
    """Number of its states in the optimizer's state dict."""


class SavedStates:
    """The states of one checkpoint; implements `StateReader`.

    Args:
        checkpoint: The checkpoint.
        has_optimizer: Read the states of the optimizer, too, and not only the weights.

    Attributes:
        bytes_read: Bytes of all values that were read.
    """

    def __init__(self, checkpoint: Checkpoint, *, has_optimizer: bool = True) -> None:
        self._has_optimizer = has_optimizer
        self._path = checkpoint.path
        self._layout = checkpoint.run.layout
        self._tp_size = self._layout.tensor_model_parallel_size
        self._experts = frozenset(checkpoint.run.experts)
        self._specs = {
            name: ShardSpec(shard.dim, shard.sections)
            for name, shard in checkpoint.run.shards.items()
        }
        self._files: dict[str, Any] = {}
        self._read_lock = checkpoint.read_lock  # not released while states may be read
        self._partitions = checkpoint.run.partitions
        self.bytes_read = 0

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            name: full_shape(saved.place.shape, self._specs.get(name), self._ep_size(name))
            for name, saved in self._saved.items()
        } | {name: tuple(state.shape) for name, state in self._layer_states.items()}

    @cached_property
    def counters(self) -> Mapping[str, int]:
        values = self._open(self._model_file(0))
        return {name: values[name] for name in COUNTERS}

    def _model_file(self, model_rank: int) -> str:
        stem = "zero_pp_rank_0_" if self._layout.zero_stage == 3 else ""
        return f"{stem}mp_rank_{model_rank:02d}_model_states.pt"

    @cached_property
    def _layer_states(self) -> Mapping[str, Tensor]:
        """States of layers, of which every rank has the same copy."""
        ranks = range(0, self._layout.pipeline_model_parallel_size * self._tp_size, self._tp_size)
        files = [self._open(self._model_file(rank)) for rank in ranks]
        return {
            name: file["module"][name] for file in files for name in file.get("buffer_names", ())
        }

    @property
    def loss_scaler(self) -> Any:
        return self._file(0, 0, 0).get("loss_scaler") if self._has_optimizer else None

    @property
    def optimizer_settings(self) -> Mapping[str, Any]:
        """DeepSpeed's record of the optimizer besides flat tensors, from the first rank."""
        file = self._file(0, 0, 0)
        settings = {name: file[name] for name in OPTIMIZER_SETTINGS if name in file}
        groups = _inner(file)["param_groups"] if self._has_optimizer else []
        return {**settings, "param_groups": groups}

    @property
    def run_settings(self) -> Mapping[str, Any]:
        """DeepSpeed's record of the run besides weights and states, from the first rank."""
        file = self._open(self._model_file(0))
        return {name: value for name, value in file.items() if name not in ("module", "optimizer")}

    def state_names(self, name: str) -> tuple[str, ...]:
        if not self._has_optimizer or name in self._layer_states:
            return ()
        state = self._state(self._saved[name], 0, 0)
        return tuple(
            key
            for key, value in state.items()
            if key != "step" and isinstance(value, Tensor) and value.dim() > 0
        )

    def steps(self, name: str) -> int | None:
        if not self._has_optimizer or name in self._layer_states:
            return None
        saved = self._saved[name]
        state = self._state(saved, 0, 0)
        if "step" in state:
            return int(state["step"])
        for group in self._optimizer(saved, 0, 0)["param_groups"]:
            if saved.number in group["params"] and "step" in group:
                return int(group["step"])
        return None

    def tensor(self, name: str, key: str) -> TensorReader:
        if name in self._layer_states:
            return TensorReader.of(self._layer_states[name])
        saved = self._saved[name]
        dtype = self._flat(saved, key, 0, 0).dtype
        return TensorReader(self.shapes[name], dtype, partial(self._read_rows, saved, key))

    def _read_rows(self, saved: _Saved, key: str, rows: range, columns: Columns | None) -> Tensor:
        name = saved.place.name
        shape = self.shapes[name]
        ep_size = self._ep_size(name)
        spec = self._specs.get(name)
        if (
            ep_size > 1 and spec is not None and spec.dim == 0
        ):  # whole experts of both kinds of ranks
            tp_spec = ShardSpec(0, (shape[0] // self._tp_size,))
            shards = [
                self._read_shard(saved, key, tp_rank, ep_rank, local)
                for tp_rank, part in spec.locate(rows, self._tp_size)
                for ep_rank, local in tp_spec.locate(part, ep_size)
            ]
            return part_of(join(shards), range(len(rows)), columns)
        parts = [
            self._read_columns(saved, key, ep_rank, local, columns)
            for ep_rank, local in ShardSpec(0, shape[:1]).locate(rows, ep_size)
        ]
        return join(parts) if parts else torch.zeros(0, *shape[1:])

    def _read_columns(
        self, saved: _Saved, key: str, ep_rank: int, rows: range, columns: Columns | None
    ) -> Tensor:
        """Rows of one expert-parallel rank, restricted to the kept columns."""
        spec = self._specs.get(saved.place.name)
        tp_size = self._tp_size
        if spec is None or spec.dim == 0:
            # Of a replicated parameter, the first rank's copy.
            places = [(0, rows)] if spec is None else spec.locate(rows, tp_size)
            full = join([self._read_shard(saved, key, tp, ep_rank, at) for tp, at in places])
            return part_of(full, range(len(full)), columns)
        dim, wanted = columns or (spec.dim, [range(sum(spec.sections))])
        assert dim == spec.dim
        shards: dict[int, Tensor] = {}
        parts = []
        for tp_rank, local in (shard for part in wanted for shard in spec.locate(part, tp_size)):
            if tp_rank not in shards:
                shards[tp_rank] = self._read_shard(saved, key, tp_rank, ep_rank, rows)
            parts.append(shards[tp_rank].narrow(dim, local.start, len(local)))
        return join(parts, dim)

    def _read_shard(
        self, saved: _Saved, key: str, tp_rank: int, ep_rank: int, rows: range
    ) -> Tensor:
        """Rows of the shard of a tensor- and an expert-parallel rank."""
        layout = self._layout
        entry = saved.place
        ep_size = self._ep_size(entry.name)
        stage = layout.zero_stage
        width = math.prod(entry.shape[1:])
        elements = range(rows.start * width, rows.stop * width)
        slices = layout.ds_sequence_parallel_size
        num_ranks = layout.data_parallel_size * slices // ep_size
        parts = []
        for rank, position, part in locate(entry, saved.partition.size, stage, num_ranks, elements):
            # The ranks are ordered (data, expert, sequence).
            outer, inner = divmod(rank, slices)
            dp_rank = (outer * ep_size + ep_rank) * slices + inner
            flat = self._flat(saved, key, tp_rank, dp_rank)
            parts.append(flat[position : position + len(part)])
        values = join(parts)
        self.bytes_read += values.nbytes
        return values.view(len(rows), *entry.shape[1:])

    def _flat(self, saved: _Saved, state_key: str, tp_rank: int, dp_rank: int) -> Tensor:
        """The flat tensor of a rank; without ZeRO the flattened parameter."""
        if state_key != MASTER:
            values: Tensor = self._state(saved, tp_rank, dp_rank)[state_key]
        elif self._layout.zero_stage == 0:
            if self._ep_size(saved.place.name) > 1:
                file = self._expert_file(saved, tp_rank, dp_rank, "model_states")
            else:
                file = self._file(saved.pp_rank, tp_rank, dp_rank)["module"]
            values = file[saved.place.name]
        else:
            file = self._file(saved.pp_rank, tp_rank, dp_rank)
            key = (
                "fp32_flat_groups"
                if self._layout.zero_stage == 3
                else "single_partition_of_fp32_groups"
            )
            values = file[key][saved.group]
        return values.flatten()

    def _state(self, saved: _Saved, tp_rank: int, dp_rank: int) -> Mapping[str, Any]:
        if self._layout.zero_stage == 0 and self._ep_size(saved.place.name) > 1:
            states = self._expert_file(saved, tp_rank, dp_rank, "optim_states")
        else:
            states = self._optimizer(saved, tp_rank, dp_rank)["state"]
        state: Mapping[str, Any] = states.get(saved.number, {})
        return state

    def _optimizer(self, saved: _Saved, tp_rank: int, dp_rank: int) -> Any:
        return _inner(self._file(saved.pp_rank, tp_rank, dp_rank))

    def _file(self, pp_rank: int, tp_rank: int, dp_rank: int) -> Any:
        """The states of a rank."""
        model_rank = pp_rank * self._tp_size + tp_rank
        if self._layout.zero_stage == 0:  # the data-parallel ranks have the same
            return self._open(f"mp_rank_{model_rank:02d}_model_states.pt")
        prefix = "bf16_" if self._layout.precision == "bf16" else ""
        stem = f"{prefix}zero_pp_rank_{dp_rank}_mp_rank_{model_rank:02d}"
        return self._open(f"{stem}_optim_states.pt")["optimizer_state_dict"]

    def _expert_file(self, saved: _Saved, tp_rank: int, dp_rank: int, states: str) -> Any:
        """The experts of a rank without ZeRO."""
        layout = self._layout
        ep_rank = dp_rank // layout.ds_sequence_parallel_size % layout.expert_model_parallel_size
        name = expert_file(ep_rank, saved.pp_rank * self._tp_size + tp_rank)
        return self._open(name.replace("model_states", states))

    def _open(self, name: str) -> Any:
        """The content of a file, memory-mapped."""
        if name not in self._files:
            self._files[name] = read_tensors(self._path / name, mmap=True)
        return self._files[name]

    @cached_property
    def _saved(self) -> Mapping[str, _Saved]:
        saved_by_name: dict[str, _Saved] = {}
        for saved in self._all_saved():
            # The first stage's copy of a tied embedding.
            saved_by_name.setdefault(saved.place.name, saved)
        return saved_by_name

    def _all_saved(self) -> Iterator[_Saved]:
        left = list(self._partitions)
        for pp_rank in range(self._layout.pipeline_model_parallel_size):
            index = 0
            file = self._file(pp_rank, 0, 0)
            is_partitioned = self._layout.zero_stage == 3
            groups = file["fp32_flat_groups"] if is_partitioned else _inner(file)["param_groups"]
            for group in range(len(groups)):
                partition = left.pop(0)
                for parameter in partition.parameters:
                    yield _Saved(parameter, partition, pp_rank, group, index)
                    index += self._layout.zero_stage == 0
                index += self._layout.zero_stage > 0
        assert not left

    def _ep_size(self, name: str) -> int:
        return self._layout.expert_model_parallel_size if name in self._experts else 1


def _inner(file: Any) -> Any:
    """The state dict of torch's optimizer in a file of any stage."""
    return next(file[key] for key in OPTIMIZER_KEYS if key in file)
