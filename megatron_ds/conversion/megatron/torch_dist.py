"""Megatron Core's `torch_dist` checkpoints, read as checkpoints of torch.distributed.

    iter_0001000/metadata.json            marks the format
    iter_0001000/.metadata                names, shapes and places of all tensors
    iter_0001000/__RANK_WRITER.distcp     their chunks
    iter_0001000/common.pt                arguments and counters; since Core 0.19 an entry instead

Tensors are stored unsharded, whatever layout wrote them, and all layers as one: each layer is read
alone. Nothing else is unpickled than by `foreign_pickle`.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_ds.config.problems import user_error
from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.megatron.arguments import arguments_of
from megatron_ds.conversion.megatron.names import PREFIX, is_ignored, stack_experts
from megatron_ds.conversion.megatron.optimizer import PARTITIONED, steps_of
from megatron_ds.conversion.megatron.rank_files import WEIGHTS, MegatronContents, Shards
from megatron_ds.conversion.megatron.torch_dist_optimizer import (
    GROUPS_ENTRY,
    WeightEntry,
    has_buckets,
    read_buckets,
)
from megatron_ds.conversion.safe_unpickle import read_dcp_metadata, read_foreign
from megatron_ds.engine.states.state_reader import MASTER, TensorReader

ALL_LAYERS = re.compile(r"(.*\blayers\.)(?!\d+\.)(.*)")
"""A name without the number of a layer: the first axis counts layers."""
NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state", "common_state")
HALVES = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
"""Gate (w) and up (v) of a gated MLP that were stored separately."""
STATE_PREFIXES = {
    WEIGHTS: "",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
    MASTER: "optimizer.state.fp32_param.",
}
PARTITIONED_MASTERS = "optimizer.state.param."
"""Prefix of master weights, if the distributed optimizer's states are saved like weights."""
COMMON_ENTRY = "common_state/shard_0_1"


def read_torch_dist(folder: Path) -> MegatronContents:
    """Opens an `iter_*` folder.

    Raises:
        UserError: If files are missing or damaged, or the backend is another one.
    """
    _require_backend(folder)
    metadata = read_dcp_metadata(folder / ".metadata")
    state = _common_state(folder, metadata)
    kinds = {key: _read_entries(folder, metadata, prefix) for key, prefix in STATE_PREFIXES.items()}
    weights = kinds.pop(WEIGHTS)
    kinds[MASTER] = kinds[MASTER] or _read_entries(folder, metadata, PARTITIONED_MASTERS)
    saved = state.get("optimizer") or {}
    unread = ""
    if any(key.startswith("optimizer.distributed.") for key in metadata.state_dict_metadata):
        kinds, unread = _read_buckets(folder, metadata, arguments_of(state.get("args")))
        saved = _read_object(folder, metadata, GROUPS_ENTRY) or saved
    elif not kinds["exp_avg"]:
        unread = "it has no optimizer states"
    inner = saved.get("optimizer", saved)
    groups = inner.get("param_groups") or [{}]
    steps = steps_of(groups[0], inner.get("state") or {})
    optimizer = {} if unread else {key: tensors for key, tensors in kinds.items() if tensors}
    return MegatronContents(state, weights, optimizer, steps, unread)


def _read_buckets(
    folder: Path, metadata: Metadata, args: Mapping[str, Any]
) -> tuple[dict[str, Shards], str]:
    """The states of a distributed optimizer, or why they cannot be read."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers")
    values = [args.get(name) for name in names]
    sizes = [value for value in values if isinstance(value, int) and value > 0]
    if not has_buckets(metadata) or len(sizes) < len(names):
        return {}, PARTITIONED
    weights: dict[str, WeightEntry] = {}
    for key, entry in _weight_entries(metadata, ""):
        if HALVES.fullmatch(key):
            return {}, PARTITIONED
        for name, layer in _layer_names(key, entry):
            weights[name] = WeightEntry(key, layer, entry)
    kinds, unread = read_buckets(metadata, weights, sizes, partial(_read_part, folder, metadata))
    return {
        state: {name: [part] for name, part in tensors.items()} for state, tensors in kinds.items()
    }, unread


def _weight_entries(metadata: Metadata, prefix: str) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """The entries of one kind that belong to weights."""
    for key, entry in sorted(metadata.state_dict_metadata.items(), reverse=True):
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name.startswith(NOT_WEIGHTS):
            continue
        if isinstance(entry, TensorStorageMetadata) and not is_ignored(PREFIX.sub("", name)):
            yield key, entry


def _read_entries(folder: Path, metadata: Metadata, prefix: str) -> Shards:
    """The entries of one kind by the names of the weights."""
    readers: dict[str, list[TensorReader]] = defaultdict(list)
    for key, entry in _weight_entries(metadata, prefix):
        name = key.removeprefix(prefix)
        halves = HALVES.fullmatch(name)
        for layer_name, layer in _layer_names(halves[1] if halves else name, entry):
            weight = WeightEntry(key, layer, entry)
            read = partial(weight.read, partial(_read_part, folder, metadata))
            readers[layer_name].append(
                TensorReader.full(weight.shape, entry.properties.dtype, read)
            )
    # w, the gate, comes before v in this order
    whole = {name: _stacked(parts) for name, parts in readers.items()}
    return {name: [tensor] for name, tensor in stack_experts([whole]).items()}


def _layer_names(name: str, entry: TensorStorageMetadata) -> list[tuple[str, int | None]]:
    """The weights of an entry by name without prefix, with the layer of each if it has several."""
    all_layers = ALL_LAYERS.fullmatch(name)
    if all_layers is None:
        return [(PREFIX.sub("", name), None)]
    before = PREFIX.sub("", all_layers[1])
    after = all_layers[2]
    return [(f"{before}{layer}.{after}", layer) for layer in range(entry.size[0])]


def _read_part(
    folder: Path, metadata: Metadata, key: str, offsets: Sequence[int], sizes: Sequence[int]
) -> Tensor:
    """Reads a part of a tensor from the chunks that it overlaps."""
    return DcpFolder(folder, metadata).read_part(key, offsets, sizes)


def _stacked(parts: list[TensorReader]) -> TensorReader:
    """One tensor, or gate and up as one."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    return TensorReader.full(
        shape, parts[0].dtype, lambda: torch.cat([part.read() for part in parts])
    )


def _common_state(folder: Path, metadata: Metadata) -> dict[str, Any]:
    """Arguments and counters, from the file or the entry."""
    common = folder / "common.pt"
    if common.is_file():
        state = read_foreign(common)
    else:
        state = _read_object(folder, metadata, COMMON_ENTRY)
        if state is None:
            raise user_error("megatron-files-missing", folder=folder, names="common.pt")
    if not isinstance(state, dict):
        raise user_error("tensor-file-unreadable", path=common, error="it has no state dict")
    return state


def _read_object(folder: Path, metadata: Metadata, key: str) -> Any:
    """Reads an entry that is not a tensor; None if the checkpoint has no such entry."""
    values = DcpFolder(folder, metadata).read_object(key)
    if values is None:
        return None
    (value,) = values
    return value


def _require_backend(folder: Path) -> None:
    path = folder / "metadata.json"
    if not path.is_file():
        return
    try:
        backend = json.loads(path.read_bytes())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise user_error("tensor-file-unreadable", path=path, error=error) from error
    if backend != "torch_dist":
        raise user_error("dcp-backend-unsupported", path=path, backend=backend)
