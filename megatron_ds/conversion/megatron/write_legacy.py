"""Writes a checkpoint of Megatron-LM in files of its `torch` format.

Owns shards of checkpoint version 3, and the order of the optimizer's states. One file is in memory
at a time, besides one full tensor.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.config.problems import ignore
from megatron_ds.conversion.megatron.names import core_names, legacy_name
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.megatron.write_common import (
    TORCH,
    adam_groups,
    check_parts,
    checkpoint_folder,
    common_state,
    grouped,
    is_of_core,
    padded,
    padded_vocab,
    without_mup,
)
from megatron_ds.conversion.source import (
    WRITE_DEFAULTS,
    SavedRun,
    SourceCheckpoint,
    WriteOptions,
    declared_weights,
)
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, TensorReaders
from megatron_ds.parallel.sharding import take_shard
from megatron_ds.parallel.weights import ShardSpec

DECODER = re.compile(r"(decoder\.layers\.)(\d+)")


def write_megatron(
    source: SourceCheckpoint,
    folder: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
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
    source = without_mup(source)
    check_parts(source, options)
    state = common_state(source, options)
    with checkpoint_folder(source, folder) as temporary:
        sizes = (options.pp_size, options.tp_size, options.ep_size)
        for stage, rank, expert_rank in itertools.product(*map(range, sizes)):
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if options.pp_size > 1 else "")
            name += f"_{expert_rank:03d}" if options.ep_size > 1 else ""
            path = temporary / name / "model_optim_rng.pt"
            path.parent.mkdir()
            part = _Stage(source, options, stage, rank, expert_rank, on_tensor)
            model = dict(part.core_model()) if is_of_core(source) else part.model()
            content = {**state, "model": model}
            if source.training is not None:
                content["optimizer"] = part.optimizer(source.training, options.adam)
            torch.save(content, path)


@dataclass(frozen=True)
class _Stage:
    """The weights of one tensor-parallel rank of one pipeline stage."""

    source: SourceCheckpoint
    options: WriteOptions
    stage: int
    rank: int
    expert_rank: int
    on_tensor: OnTensor

    @property
    def layers(self) -> range:
        size = self.source.settings.model.num_layers // self.options.pp_size
        return range(self.stage * size, (self.stage + 1) * size)

    @property
    def is_last(self) -> bool:
        return self.stage == self.options.pp_size - 1

    @property
    def has_copy(self) -> bool:
        """Whether the output layer has the embedding of another stage."""
        return self.is_last and self.stage > 0 and "head.weight" not in self.source.tensors

    def model(self) -> dict[str, Any]:
        language_model: dict[str, Any] = {}
        if self.stage == 0:
            language_model["embedding"] = {
                f"{table}_embeddings": {"weight": self._shard(name)}
                for table in ("word", "position")
                if (name := f"embedding.{table}.weight") in self.source.tensors
            }
        language_model["encoder"] = dict(self._encoder())
        if self.is_last and "head.weight" in self.source.tensors:
            language_model["output_layer"] = {"weight": self._shard("head.weight")}
        model: dict[str, Any] = {"language_model": language_model}
        if self.has_copy:
            copy = self._shard("embedding.word.weight")
            model["word_embeddings_for_head"] = {"weight": copy}
        return model

    def core_model(self) -> Iterator[tuple[str, Tensor]]:
        """The state dict of Megatron Core's model."""
        depths = self.source.settings.model.mtp_num_layers
        names = core_names(self.source.tensors, self.source.settings.model.num_layers)
        for name, theirs in names.items():
            is_copied = depths and self.is_last and name.startswith("embedding.")
            if not is_copied and not self._has(name):
                continue
            if layer := DECODER.match(theirs):
                theirs = f"{layer[1]}{int(layer[2]) - self.layers.start}{theirs[layer.end() :]}"
            full = self._shard(name)
            stack = theirs.split(".experts.experts.")
            if len(stack) == 1:
                yield theirs, full
            for index, expert in enumerate(full if len(stack) == 2 else ()):
                yield f".experts.local_experts.{index}.".join(stack), expert.clone()
        if self.has_copy:
            yield "output_layer.weight", self._shard("embedding.word.weight")

    def optimizer(self, training: SavedRun, adam: str) -> dict[str, Any]:
        """The state dict of the optimizer: parameters with weight decay first, each in the order of
        the model."""
        held = [name for name in self.source.tensors if self._has(name)]
        held += ["embedding.word.weight"] if self.has_copy else []
        groups = adam_groups(training, adam)
        by_group = [
            [name for name in held if (len(self.source.tensors[name].shape) > 1) == is_decayed]
            for is_decayed in (True, False)
        ]
        count = itertools.count()
        states = {}
        for group, names in zip(groups, by_group, strict=True):
            numbers = [next(count) for _ in names]
            group["params"] = numbers
            for index, name in zip(numbers, names, strict=True):
                states[index] = {
                    key: self._shard(name, self.source.optimizer[key]) for key in MOMENTS
                }
                if adam == TORCH:
                    states[index]["step"] = torch.tensor(training.steps, dtype=torch.float32)
        inner = {"state": states, "param_groups": groups}
        masters = self.source.optimizer.get(MASTER)
        if masters is None:
            return inner
        kept = [[self._shard(name, masters) for name in names] for names in by_group]
        return {"optimizer": inner, "fp32_from_fp16_params": kept}

    def _has(self, name: str) -> bool:
        """Whether a parameter is in this stage, other than as a copy."""
        if name.startswith("layers."):
            layer = int(name.split(".")[1])
            is_predicted = layer >= self.source.settings.model.num_layers
            return self.is_last if is_predicted else layer in self.layers
        return self.stage == 0 if name.startswith("embedding.") else self.is_last

    def _encoder(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.source.tensors:
            inner = legacy_name(name)
            if name.startswith("layers.") and self._has(name):
                layer = int(name.split(".")[1]) - self.layers.start
                yield f"layers.{layer}.{inner}", self._shard(name)
            elif name.startswith("final_norm.") and self.is_last:
                yield inner, self._shard(name)

    def _shard(self, name: str, tensors: TensorReaders | None = None) -> Tensor:
        """A tensor's part of this rank, in Megatron's order, in memory of its own."""
        model = self.source.settings.model
        tp_size = self.options.tp_size
        tensor = (self.source.tensors if tensors is None else tensors)[name]
        full = tensor.read()
        if name in VOCABULARY_TABLES:
            full = padded(full, padded_vocab(self.source, tp_size))
        if ".attention.qkv." in name:
            full = grouped(full, model)
        weight = declared_weights(model, self.source.settings.moe)[name]
        if weight.is_stacked:
            full = full.chunk(self.options.ep_size)[self.expert_rank]
        spec = weight.shard
        if spec is not None:
            if name in VOCABULARY_TABLES or ".attention.qkv." in name:
                spec = ShardSpec(0, (len(full),))
            full = take_shard(full, spec, self.rank, tp_size)
        self.on_tensor(name, tensor.nbytes // tp_size)
        return full.clone()  # torch.save writes the entire storage of a view
