"""Writes a checkpoint of Megatron Core's `torch_dist` format, by torch's own writer.

Owns the names and shapes of Core's distributed checkpoints. Tensors are written unsharded, all
layers under one name with the layer as the first axis, so that any layout can load them. One tensor
is in memory at a time.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import ignore
from megatron_ds.conversion.dcp.write import save_planned
from megatron_ds.conversion.megatron.names import core_names
from megatron_ds.conversion.megatron.rank_files import WEIGHTS
from megatron_ds.conversion.megatron.torch_dist import STATE_PREFIXES
from megatron_ds.conversion.megatron.write_common import (
    TORCH,
    adam_groups,
    check_parts,
    checkpoint_folder,
    common_state,
    grouped,
    padded,
    padded_vocab,
    without_mup,
)
from megatron_ds.conversion.source import WRITE_DEFAULTS, SourceCheckpoint, WriteOptions
from megatron_ds.engine.states.state_reader import (
    MASTER,
    VOCABULARY_TABLES,
    TensorReader,
    TensorReaders,
)

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""metadata.json of Core 0.8 to 0.18. Core 0.19 has no common backend of its own, but still reads
common.pt where there is one."""
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
"""Layouts of Core that the keys follow."""
LAYERS = re.compile(r"decoder\.layers\.(\d+\.)")
LINEAR = re.compile(r"((?!optimizer\.).*\.(?:linear_\w+|eh_proj)\.)weight")


def write_torch_dist(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes a folder for the --load of Megatron Core's training, complete, or not at all.

    With the states of a training run, it is a checkpoint of its iteration, otherwise a `release`.

    Args:
        source: The weights, without padding.
        folder: Must not exist, or be empty.
        options: The layout among the arguments, for whose tensor-parallel size the vocabulary is
            padded, and the Adam that loads the states.
        on_tensor: Reports progress.

    Raises:
        UserError: If Megatron's model lacks a part, the sizes do not divide it, or the folder has
            files already.
        OSError: If the disk fails.
    """
    source = without_mup(source)
    check_parts(source, options)
    changes = {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    state = common_state(source, options, **changes) | {"content_metadata": CONTENT}
    training = source.training
    chunks = list(_chunks(source, WEIGHTS, source.tensors, options.tp_size))
    if training is not None:
        steps = torch.tensor(training.steps, dtype=torch.float32)
        counted = {"common_step": steps} if options.adam == TORCH else {}
        inner = {"param_groups": adam_groups(training, options.adam), "state": counted}
        state["optimizer"] = inner if MASTER not in source.optimizer else {"optimizer": inner}
        for key, tensors in source.optimizer.items():
            chunks += _chunks(source, key, tensors, options.tp_size)
    with checkpoint_folder(source, folder) as path:
        save_planned(path, _Planner(source.settings.model, chunks, on_tensor))
        torch.save(state, path / "common.pt")
        (path / "metadata.json").write_text(json.dumps(BACKEND))


@dataclass(frozen=True)
class _Chunk:
    """A part of an entry of the checkpoint: a full tensor, or one of its layers."""

    name: str
    """Canonical name of the parameter."""
    key: str
    size: tuple[int, ...]
    """Shape of the entry."""
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    tensor: TensorReader

    @property
    def item(self) -> WriteItem:
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.shape))
        properties = TensorProperties(dtype=self.tensor.dtype)
        return WriteItem(
            MetadataIndex(self.key, chunk.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, torch.Size(self.size)),
        )

    def read(self, model: ModelConfig) -> Tensor:
        """The values, in Megatron's order and with its padding."""
        full = self.tensor.read()
        if self.name in VOCABULARY_TABLES:
            full = padded(full, self.shape[0])
        elif ".attention.qkv." in self.name:
            full = grouped(full, model)
        return full.view(self.shape)


def _chunks(
    source: SourceCheckpoint, state_key: str, tensors: TensorReaders, tp_size: int
) -> Iterator[_Chunk]:
    """The chunks of the weights, or of one kind of optimizer state."""
    model = source.settings.model
    moe = source.settings.moe
    names = core_names(source.tensors, model.num_layers)
    is_uniform = len({moe.has_experts(layer) for layer in range(model.num_layers)}) == 1
    for name, tensor in tensors.items():
        shape = tensor.shape
        if name in VOCABULARY_TABLES:
            shape = (padded_vocab(source, tp_size), *shape[1:])
        key = f"{STATE_PREFIXES[state_key]}{names[name]}"
        offsets = (0,) * len(shape)
        size = shape
        layer = LAYERS.search(key)
        if layer and is_uniform:
            key = f"{key[: layer.start(1)]}{key[layer.end(1) :]}"
            offsets = (int(layer[1][:-1]), *offsets)
            size = (model.num_layers, *size)
            shape = (1, *shape)
        yield _Chunk(name, key, size, offsets, shape, tensor)


def _empty_states(chunks: Sequence[_Chunk]) -> Iterator[WriteItem]:
    """Empty states of fp8 arithmetic, one for each linear layer."""
    for chunk in chunks:
        if (module := LINEAR.fullmatch(chunk.key)) is None:
            continue
        axes = len(chunk.size) - 2  # a layer, an expert
        counts = [range(1)] * (not axes) + [
            range(offset, offset + length)
            for offset, length in zip(chunk.offsets[:axes], chunk.shape[:axes], strict=True)
        ]
        total = ".".join(map(str, chunk.size[:axes] or (1,)))
        for indices in itertools.product(*counts):
            shard = f"shard_{'.'.join(map(str, indices))}_{total}"
            yield WriteItem(
                MetadataIndex(f"{module[1]}_extra_state/{shard}"), WriteItemType.BYTE_IO
            )


class _Planner(DefaultSavePlanner):
    """Yields tensors to torch's writer one at a time.

    Args:
        model: The model.
        chunks: All parts of all entries.
        on_tensor: Reports progress.
    """

    def __init__(self, model: ModelConfig, chunks: Sequence[_Chunk], on_tensor: OnTensor) -> None:
        super().__init__(flatten_state_dict=False)
        self._model = model
        self._on_tensor = on_tensor
        self._chunks = {chunk.item.index: chunk for chunk in chunks}

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """The plan follows from the chunks; the state dict is empty."""

    def create_local_plan(self) -> SavePlan:
        chunks = [*self._chunks.values()]
        return SavePlan([*_empty_states(chunks), *(chunk.item for chunk in chunks)])

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            content = io.BytesIO()
            torch.save([None], content)
            return content
        chunk = self._chunks[write_item.index]
        values = chunk.read(self._model)
        self._on_tensor(chunk.name, chunk.tensor.nbytes)
        return values
