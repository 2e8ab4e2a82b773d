"""Megatron Core's `torch_dist` checkpoints, read by torch's distributed-checkpoint reader.

    iter_0001000/metadata.json            marks the format
    iter_0001000/.metadata                names, shapes and places of all tensors
    iter_0001000/__RANK_WRITER.distcp     their chunks
    iter_0001000/common.pt                arguments and counters; since Core 0.19 an entry instead

Tensors are stored whole, whatever layout wrote them, and those of all layers as one: each layer is
read alone. Nothing else is unpickled than by `foreign_pickle`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_ds.checkpoint.formats.foreign_pickle import read_dcp_metadata, read_foreign
from megatron_ds.checkpoint.formats.megatron_files import WEIGHTS, FoundWeights, Shards
from megatron_ds.checkpoint.formats.megatron_names import PREFIX, is_ignored
from megatron_ds.checkpoint.formats.megatron_optimizer import PARTITIONED, steps_of
from megatron_ds.checkpoint.lazy_tensors import LazyTensor
from megatron_ds.config.problems import user_error
from megatron_ds.engine.full_states import MASTER

ALL_LAYERS = re.compile(r"(.*\blayers\.)(?!\d+\.)(.*)")
"""A name without the number of a layer: the first axis counts layers."""
NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state", "common_state")
HALVES = re.compile(r"(.*\.linear_fc1\.weight)_([wv])")
"""Gate (w) and up (v) of a gated MLP that were stored separately."""
STATE_PREFIXES = {
    WEIGHTS: "",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
    MASTER: "optimizer.state.fp32_param.",
}
COMMON_ENTRY = "common_state/shard_0_1"


def read_torch_dist(folder: Path) -> FoundWeights:
    """Opens an `iter_*` folder.

    Raises:
        UserError: If files are missing or damaged, or the backend is another one.
    """
    _require_backend(folder)
    metadata = read_dcp_metadata(folder / ".metadata")
    state = _common_state(folder, metadata)
    kinds = {
        kind: _read_entries(folder, metadata, prefix) for kind, prefix in STATE_PREFIXES.items()
    }
    weights = kinds.pop(WEIGHTS)
    unread = ""
    if any(key.startswith("optimizer.distributed.") for key in metadata.state_dict_metadata):
        unread = PARTITIONED
    elif not kinds["exp_avg"]:
        unread = "it has no optimizer states"
    saved = state.get("optimizer") or {}
    inner = saved.get("optimizer", saved)
    groups = inner.get("param_groups") or [{}]
    steps = steps_of(groups[0], inner.get("state") or {})
    optimizer = {} if unread else {kind: found for kind, found in kinds.items() if found}
    return FoundWeights(state, weights, optimizer, steps, unread)


def _read_entries(folder: Path, metadata: Metadata, prefix: str) -> Shards:
    """The entries of one kind by the names of the weights."""
    found: dict[str, list[LazyTensor]] = defaultdict(list)
    for key, entry in sorted(metadata.state_dict_metadata.items(), reverse=True):
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name.startswith(NOT_WEIGHTS):
            continue
        if isinstance(entry, BytesStorageMetadata) or is_ignored(PREFIX.sub("", name)):
            continue
        halves = HALVES.fullmatch(name)
        name = halves[1] if halves else name
        for layer_name, tensor in _layers(folder, metadata, key, name, entry):
            found[layer_name].append(tensor)  # w, the gate, comes before v in this order
    return {name: [_stacked(parts)] for name, parts in found.items()}


def _layers(
    folder: Path, metadata: Metadata, key: str, name: str, entry: TensorStorageMetadata
) -> list[tuple[str, LazyTensor]]:
    """The tensors of an entry by name: one, or one for each layer."""
    shape, dtype = tuple(entry.size), entry.properties.dtype
    all_layers = ALL_LAYERS.fullmatch(name)
    if all_layers is None:
        read = partial(_read_part, folder, metadata, key, (0,) * len(shape), shape)
        return [(PREFIX.sub("", name), LazyTensor(shape, dtype, read))]
    before, after = PREFIX.sub("", all_layers[1]), all_layers[2]
    rest = shape[1:]
    return [
        (
            f"{before}{layer}.{after}",
            LazyTensor(rest, dtype, partial(_read_layer, folder, metadata, key, layer, rest)),
        )
        for layer in range(shape[0])
    ]


def _read_layer(
    folder: Path, metadata: Metadata, key: str, layer: int, shape: tuple[int, ...]
) -> Tensor:
    offsets = (layer, *(0 for _ in shape))
    return _read_part(folder, metadata, key, offsets, (1, *shape)).squeeze(0)


def _read_part(
    folder: Path, metadata: Metadata, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Tensor:
    """Reads a part of a tensor from the chunks that it overlaps."""
    entry = metadata.state_dict_metadata[key]
    assert isinstance(entry, TensorStorageMetadata)
    wanted = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    items = create_read_items_for_chunk_list(key, entry, [wanted])
    part = torch.empty(sizes, dtype=entry.properties.dtype)
    if sum(item.lengths.numel() for item in items) != part.numel():
        raise user_error("dcp-tensor-incomplete", folder=folder, key=key)
    reader = FileSystemReader(folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        reader.read_data(LoadPlan(items), _IntoTensor(part)).wait()
    except Exception as error:  # torch raises errors of its zip reader and its unpickler
        raise user_error("tensor-file-unreadable", path=folder, error=error) from error
    return part


class _IntoTensor(LoadPlanner):
    """Lets a reader write into one tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self._target
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            part = part.narrow(dim, start, size)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do."""

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Part of torch's interface."""

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    create_global_plan = finish_plan = load_bytes = create_local_plan  # type: ignore[assignment]


def _stacked(parts: list[LazyTensor]) -> LazyTensor:
    """One tensor, or gate and up as one."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return LazyTensor(shape, parts[0].dtype, lambda: torch.cat([part.read() for part in parts]))


def _common_state(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Arguments and counters, from the file or the entry."""
    common = folder / "common.pt"
    if common.is_file():
        state = read_foreign(common)
    else:
        stored = metadata.storage_data.get(MetadataIndex(COMMON_ENTRY))
        if stored is None:
            raise user_error("megatron-files-missing", folder=folder, names="common.pt")
        with open(folder / stored.relative_path, "rb") as file:
            file.seek(stored.offset)
            content = file.read(stored.length)
        (state,) = read_foreign(content, f"{folder / stored.relative_path} ({COMMON_ENTRY})")
    if not isinstance(state, dict):
        raise user_error("tensor-file-unreadable", path=common, error="it has no state dict")
    return state


def _require_backend(folder: Path) -> None:
    path = folder / "metadata.json"
    if not path.is_file():
        return
    try:
        backend = json.loads(path.read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise user_error("tensor-file-unreadable", path=path, error=error) from error
    if backend != "torch_dist":
        raise user_error("dcp-backend-unsupported", path=path, backend=backend)
