"""Writes a checkpoint of torch.distributed by torch's own writer, one tensor at a time."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders


def write_dcp(folder: Path, tensors: TensorReaders, on_tensor: OnTensor) -> None:
    """Writes whole tensors to a folder that exists.

    Args:
        folder: The folder.
        tensors: Tensors by name.
        on_tensor: Reports progress.

    Raises:
        OSError: If the disk fails.
    """
    save_planned(folder, _Planner(tensors, on_tensor))


def save_planned(folder: Path, planner: SavePlanner) -> None:
    """Writes the items of a planner to a folder; raises what reading or writing one raises."""
    try:
        # Files are flushed to the disk together, by `output_folder`.
        writer = FileSystemWriter(folder, sync_files=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            save({}, storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # torch wraps whatever was raised
        raise next(failure for failure, _ in error.failures.values()) from error


class _Planner(DefaultSavePlanner):
    """Gives torch's writer one tensor after the other."""

    def __init__(self, tensors: Mapping[str, TensorReader], on_tensor: OnTensor) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors
        self._on_tensor = on_tensor

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """The plan follows from the tensors; the state dict is empty."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_item(name, tensor) for name, tensor in self._tensors.items()])

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn
        values = self._tensors[name].read().contiguous()
        self._on_tensor(name, values.nbytes)
        return values


def _item(name: str, tensor: TensorReader) -> WriteItem:
    size = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    properties = TensorProperties(dtype=tensor.dtype)
    data = TensorWriteData(chunk, properties, size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
