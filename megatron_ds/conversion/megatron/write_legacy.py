"""Writes a checkpoint of Megatron-LM in files of its `torch` format.

Owns names and shards of checkpoint version 3, and the order of the optimizer's states. One file is
in memory at a time, besides one full tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.output_folder import OnTensor
from megatron_ds.config import ModelConfig
from megatron_ds.conversion.megatron.names import megatron_name
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.megatron.write_common import (
    TORCH,
    adam_groups,
    check_parts,
    checkpoint_folder,
    common_state,
    grouped,
    padded,
    padded_vocab,
)
from megatron_ds.conversion.source import WRITE_DEFAULTS, SavedRun, SourceCheckpoint, WriteOptions
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, TensorReaders
from megatron_ds.parallel.sharding import ShardSpec, take_shard


def write_megatron(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = lambda name, size: None,
) -> None:
    """Writes a folder for Megatron's --load, complete, or not at all.

    With the states of a training run, it is a checkpoint of its iteration, otherwise a `release`.

    Args:
        source: The weights, without padding.
        folder: Must not exist, or be empty.
        options: The layout, and the Adam that loads the states.
        on_tensor: Reports progress.

    Raises:
        UserError: If Megatron's model lacks a part, the sizes do not divide it, or the folder has
            files already.
        OSError: If the disk fails.
    """
    check_parts(source, options)
    state = common_state(source, options)
    tp_size, pp_size = options.tp_size, options.pp_size
    with checkpoint_folder(source, folder) as temporary:
        for stage in range(pp_size):
            for rank in range(tp_size):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp_size > 1 else "")
                path = temporary / name / "model_optim_rng.pt"
                path.parent.mkdir()
                part = _Stage(source, stage, pp_size, rank, tp_size, on_tensor)
                content = {**state, "model": part.model()}
                if source.training is not None:
                    content["optimizer"] = part.optimizer(source.training, options.adam)
                torch.save(content, path)


class _Stage:
    """The weights of one tensor-parallel rank of one pipeline stage."""

    def __init__(
        self,
        source: SourceCheckpoint,
        stage: int,
        pp_size: int,
        rank: int,
        tp_size: int,
        on_tensor: OnTensor,
    ) -> None:
        self._source, self._model = source, source.settings.model
        self._rank, self._tp_size, self._on_tensor = rank, tp_size, on_tensor
        per_stage = self._model.num_layers // pp_size
        self._layers = range(stage * per_stage, (stage + 1) * per_stage)
        self._is_first, self._is_last = stage == 0, stage == pp_size - 1

    def model(self) -> dict[str, Any]:
        language_model: dict[str, Any] = {}
        if self._is_first:
            language_model["embedding"] = {
                name: {"weight": shard} for name, shard in self._tables()
            }
        language_model["encoder"] = dict(self._encoder())
        tensors = self._source.tensors
        if self._is_last and "head.weight" in tensors:
            language_model["output_layer"] = {"weight": self._shard("head.weight")}
        model: dict[str, Any] = {"language_model": language_model}
        if self._is_last and not self._is_first and "head.weight" not in tensors:
            copy = self._shard("embedding.word.weight")
            model["word_embeddings_for_head"] = {"weight": copy}
        return model

    def optimizer(self, training: SavedRun, adam: str) -> dict[str, Any]:
        """The state dict of the optimizer: parameters with weight decay first, each in the order of
        the model."""
        own = [name for name in self._source.tensors if self._has(name)]
        if self._is_last and not self._is_first and "head.weight" not in self._source.tensors:
            own.append("embedding.word.weight")  # the copy for the output layer
        groups = adam_groups(training, adam)
        by_group = [
            [name for name in own if (len(self._source.tensors[name].shape) > 1) == is_decayed]
            for is_decayed in (True, False)
        ]
        count = itertools.count()
        states = {}
        for group, names in zip(groups, by_group, strict=True):
            numbers = [next(count) for _ in names]
            group["params"] = numbers
            for number, name in zip(numbers, names, strict=True):
                states[number] = {
                    kind: self._shard(name, self._source.optimizer[kind]) for kind in MOMENTS
                }
                if adam == TORCH:
                    states[number]["step"] = torch.tensor(training.steps, dtype=torch.float32)
        inner = {"state": states, "param_groups": groups}
        masters = self._source.optimizer.get(MASTER)
        if masters is None:
            return inner
        kept = [[self._shard(name, masters) for name in names] for names in by_group]
        return {"optimizer": inner, "fp32_from_fp16_params": kept}

    def _has(self, name: str) -> bool:
        """Whether a parameter is in this stage, other than as a copy."""
        if name.startswith("layers."):
            return int(name.split(".")[1]) in self._layers
        return self._is_first if name.startswith("embedding.") else self._is_last

    def _tables(self) -> Iterator[tuple[str, Tensor]]:
        yield "word_embeddings", self._shard("embedding.word.weight")
        if "embedding.position.weight" in self._source.tensors:
            yield "position_embeddings", self._shard("embedding.position.weight")

    def _encoder(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._source.tensors:
            inner = megatron_name(name, core=False)
            if name.startswith("layers.") and self._has(name):
                number = int(name.split(".")[1]) - self._layers.start
                yield f"layers.{number}.{inner}", self._shard(name)
            elif name.startswith("final_norm.") and self._is_last:
                yield inner, self._shard(name)

    def _shard(self, name: str, tensors: TensorReaders | None = None) -> Tensor:
        """A tensor's part of this rank, in Megatron's order, in memory of its own."""
        model = self._model
        tensor = (self._source.tensors if tensors is None else tensors)[name]
        full = tensor.read()
        if name in VOCABULARY_TABLES:
            full = padded(full, padded_vocab(self._source, self._tp_size))
        if ".attention.qkv." in name:
            full = grouped(full, model)
        spec = _spec(name, full, model)
        if spec is not None:
            full = take_shard(full, spec, self._rank, self._tp_size)
        self._on_tensor(name, tensor.nbytes // self._tp_size)
        return full.clone()  # torch.save writes the whole storage of a view


def _spec(name: str, full: Tensor, model: ModelConfig) -> ShardSpec | None:
    """How Megatron shards a tensor; None if every rank has all of it."""
    if name.endswith(("attention.proj.weight", "mlp.fc_out.weight")):
        return ShardSpec(1, (full.shape[1],))
    if ".mlp.fc_in." in name and model.is_gated:
        return ShardSpec(0, (model.mlp_hidden_size,) * 2)
    is_sharded = name in VOCABULARY_TABLES or ".attention.qkv." in name or ".mlp.fc_in." in name
    return ShardSpec(0, (full.shape[0],)) if is_sharded else None
