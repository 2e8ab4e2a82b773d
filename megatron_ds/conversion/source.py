"""A checkpoint of any format, as readers give and writers take it.

Owns the description of a model and a run apart from tensors. Knows no format.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_ds.checkpoint.compatibility import Parts, part_conflicts
from megatron_ds.checkpoint.metadata import Checkpoint
from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.fields import field_problems
from megatron_ds.config.problems import Problem, ignore, raise_if_any, user_error
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.safetensors_files import SHARD_BYTES
from megatron_ds.conversion.step_settings import StepSettings
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, TensorReaders
from megatron_ds.model.declaration.architecture import is_state, model_spec
from megatron_ds.parallel.weights import Weight

SIZES = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "max_position_embeddings",
)
"""Options of the model that are at most the size of a tensor."""
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of weights."""
ADAM_SETTINGS = ("lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "min_lr")
"""Settings of the optimizer that continue a run, by Megatron's name."""


@dataclass(frozen=True)
class SavedRun:
    """The training run that saved a checkpoint."""

    iteration: int
    consumed_samples: int | None
    """Samples of the run so far; None if the checkpoint does not state it."""
    applied_samples: int | None
    """Samples in steps that were not skipped; the learning rate schedule counts these."""
    steps: int | None
    """Steps of the optimizer."""
    softmax_rows: int | None
    """Rows of the vocabulary tables over which the loss normalizes; those after the vocabulary are
    padding that is trained. None: all rows."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Its settings of the optimizer by Megatron's names, `ADAM_SETTINGS` as far as known."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """State dict of Megatron's scheduler of learning rate and weight decay; empty if unknown."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Further states of the optimizer that are not tensors."""
    settings: StepSettings | None = None
    """What its files state of its steps, which a run that continues it must not contradict. None:
    the flags of that run count, as of Megatron's."""


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint of any format; nothing is read before a tensor's `read` is called."""

    path: Path
    """The folder of the checkpoint itself, not a --save folder around it."""
    format: str
    settings: ModelSettings
    tensors: TensorReaders
    """Full tensors by canonical name: the parameter names of the model without tensor- and pipeline
    parallelism. A vocabulary table may be padded; a tied output layer is absent."""
    precision: torch.dtype | None = None
    """Type in which the model was trained, where this is known and tensors may have another one."""
    parts: Parts = field(default_factory=dict)
    """Parts of fused tensors, as the file declares them; empty if its format defines their
    order."""
    optimizer: Mapping[str, TensorReaders] = field(default_factory=dict)
    """Full states by kind and canonical name, MASTER among them for weights in half precision;
    empty if they are not read. A vocabulary table may be padded."""
    unread: str = "the folder has weights alone"
    """Reason that another program cannot continue with these states; empty if it can."""
    run: SavedRun | None = None
    """None for weights alone."""
    notes: tuple[Problem, ...] = ()
    """Warnings for the user."""
    native: Checkpoint | None = None
    """The checkpoint of this program, which a run does not remove while it is open."""
    confirm: Callable[[], object] = ignore
    """Waits until all files have been compared with their checksums, and raises UserError if one is
    damaged. Called by writers when their output is complete, before it appears."""
    merged: tuple[SourceCheckpoint, ...] = ()
    """The sources whose weights these are merged from, the first of which is at `path`."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        states = (self.tensors, *self.optimizer.values())
        return sum(tensor.nbytes for tensors in states for tensor in tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model: the run's, otherwise the type of most elements."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += math.prod(tensor.shape)
        return self.precision or sizes.most_common(1)[0][0]

    @property
    def rows(self) -> int:
        """Rows of the vocabulary tables that have a part in the loss."""
        rows = self.run.softmax_rows if self.run else None
        return rows or self.tensors[VOCABULARY_TABLES[0]].shape[0]

    @property
    def paths(self) -> list[Path]:
        """The folders that are read."""
        return [source.path for source in self.merged] or [self.path]

    @property
    def iteration(self) -> int | None:
        """Iteration of the run that saved it; None for weights alone."""
        if self.native is not None:
            return self.native.run.state.iteration
        return None if self.run is None else self.run.iteration

    @property
    def training(self) -> SavedRun | None:
        """The run, if its optimizer states are here."""
        return self.run if self.optimizer else None

    def release(self) -> None:
        """Lets a run remove the checkpoint."""
        for source in self.merged or (self,):
            if source.native is not None and source.native.read_lock is not None:
                source.native.read_lock.release()

    def weights(self) -> SourceCheckpoint:
        """The checked weights alone."""
        return dataclasses.replace(self, optimizer={}).checked()

    def without_predictions(self) -> SourceCheckpoint:
        """The source without multi-token prediction."""
        settings = self.settings.without_predictions()
        names = declared_weights(settings.model, settings.moe)
        tensors, *states = (
            {name: weights[name] for name in names if name in weights}
            for weights in (self.tensors, *self.optimizer.values())
        )
        optimizer = dict(zip(self.optimizer, states, strict=True))
        return dataclasses.replace(self, settings=settings, tensors=tensors, optimizer=optimizer)

    def checked(self, *, may_be_padded: bool = True) -> SourceCheckpoint:
        """This source, without padding of the vocabulary that has no part in the loss.

        Weights without optimizer states have no rows after the vocabulary.

        Args:
            may_be_padded: Whether the format has such padding.

        Raises:
            UserError: If names, types, shapes or parts are not the model's.
        """
        model = self.settings.model
        if self.optimizer:
            model = dataclasses.replace(model, vocab_size=self.rows)
        weights = declared_weights(model, self.settings.moe)
        expected = {name: weight.shape for name, weight in weights.items()}
        if self.parts:
            fused = fused_parts(weights)
            raise_if_any(part_conflicts(self.parts, fused, self.path))
        stepped = {name: weight.shape for name, weight in weights.items() if not is_state(weight)}
        optimizer = {key: _fitted(states, stepped) for key, states in self.optimizer.items()}
        tensors = _fitted(self.tensors, expected, may_be_padded)
        return dataclasses.replace(self, tensors=tensors, optimizer=optimizer)

    def with_vocab(self, vocab_size: int) -> SourceCheckpoint:
        """The source with another number of ids: the first rows of its vocabulary tables."""
        fixed = {**self.settings.fixed, "vocab_size": vocab_size}
        settings = dataclasses.replace(self.settings, fixed=fixed, may_have_padding=False)
        return dataclasses.replace(self, settings=settings).checked()

    def to(self, dtype: torch.dtype | None) -> SourceCheckpoint:
        """The source with all weights in a type, and states of layers in fp32. None: as they are.

        With the states of a run, they are rounded from the master weights, and only weights in
        half precision keep these.
        """
        if dtype is None:
            return self
        declared = declared_weights(self.settings.model, self.settings.moe)
        states = {name: self.tensors[name] for name, item in declared.items() if is_state(item)}
        weights = self.tensors
        optimizer = dict(self.optimizer)
        if optimizer:
            weights = optimizer.pop(MASTER, weights)
            if dtype != torch.float32:
                optimizer[MASTER] = {name: item.to(torch.float32) for name, item in weights.items()}
        tensors = {name: tensor.to(dtype) for name, tensor in weights.items()} | states
        return dataclasses.replace(self, tensors=tensors, precision=dtype, optimizer=optimizer)


@dataclass(frozen=True)
class ReadOptions:
    """The parts of a checkpoint that are read."""

    warn: Callable[[str], None] = ignore
    """Called with each warning."""
    optimizer: bool = False
    """Its optimizer states, too; a format may read them even so."""
    run: bool = False
    """The progress of its run, which is read with optimizer states even so."""
    masters: bool = False
    """The fp32 master weights of a run instead of its weights."""
    checksums: bool = True
    """Compare the files with their checksums, where the format has some."""
    pending: Mapping[Path, Future[bool]] = field(default_factory=dict)
    """Files that are being compared: whether they match. `SourceCheckpoint.confirm` waits."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model for a checkpoint that has none."""
    given: frozenset[str] = frozenset()
    """Those that the user gave, by name; the others are defaults."""


@dataclass(frozen=True)
class WriteOptions:
    """Settings for writing a checkpoint."""

    hf_model_type: str | None = None
    """Family of an hf target. None: the original one, or the first that has the parts."""
    tp_size: int = 1
    """Tensor-parallel size of a megatron or torch_dist target."""
    pp_size: int = 1
    """Pipeline stages of such a target."""
    ep_size: int = 1
    """Expert-parallel size of a megatron target."""
    adam: str = "fused"
    """Implementation of Adam that loads the states of a training run: "fused", of Transformer
    Engine or apex, or "torch", torch's AdamW."""
    quantization: str | None = None
    """Type of the quantized matrices of a gguf target, q8_0. None: the type of the weights."""
    shard_bytes: int = SHARD_BYTES
    engines: Sequence[str] = ()
    """Inference engines of engines/facts.toml that load an hf target; empty: none is named."""
    warn: Callable[[str], None] = ignore
    """Called with each warning."""


READ_DEFAULTS = ReadOptions()
READ_UNVERIFIED = ReadOptions(checksums=False)
WRITE_DEFAULTS = WriteOptions()


def _fitted(
    tensors: TensorReaders, expected: Mapping[str, tuple[int, ...]], may_be_padded: bool = True
) -> TensorReaders:
    """Tensors in the model's order, without padding of the vocabulary.

    Raises:
        UserError: If names, types or shapes are not the model's.
    """
    missing = expected.keys() - tensors.keys()
    unknown = tensors.keys() - expected
    if missing or unknown:
        raise user_error(
            "weights-names-mismatch", parameters=sorted(missing), unknown=sorted(unknown)
        )
    fitted = {}
    for name, shape in expected.items():
        tensor = tensors[name]
        if name in VOCABULARY_TABLES and may_be_padded:
            tensor = tensor.first_rows(shape[0])
        if tensor.dtype not in TYPES:
            raise user_error("weights-type-unsupported", name=name, dtype=tensor.dtype)
        if tensor.shape != shape:
            raise user_error(
                "weights-shape-mismatch", name=name, shape=list(tensor.shape), expected=list(shape)
            )
        fitted[name] = tensor
    return fitted


def check_sizes(settings: ModelSettings, tensors: TensorReaders, path: Path) -> None:
    """Checks the sizes of a model against its tensors, before the model is described with them.

    Args:
        settings: Options of the model.
        tensors: Tensors in any layout.
        path: Path in the error message.

    Raises:
        UserError: If an option is invalid, or larger than anything in the files.
    """
    model = settings.model
    moe = settings.moe
    problems = [*field_problems(model), *model.problems(1)]
    problems += [*field_problems(moe), *moe.problems(model, 1, 1)]
    largest = max((size for tensor in tensors.values() for size in tensor.shape), default=0)
    limits = {**dict.fromkeys(SIZES, largest), "num_layers": len(tensors)}
    if model.is_rotary:  # they have no table
        limits["max_position_embeddings"] = sys.maxsize
    shown = [problem.render() for problem in problems] + [
        f"{name} {settings.fixed[name]} is larger than the tensors"
        for name, limit in limits.items()
        if settings.fixed.get(name, 0) > limit
    ]
    shown += [
        f"{name} is {value!r}"
        for name in limits
        if type(value := getattr(model, name)) not in (int, type(None))
    ]
    if shown:
        raise user_error("foreign-file-unreadable", path=path, error="; ".join(shown))


def declared_weights(model: ModelConfig, moe: MoEConfig) -> dict[str, Weight]:
    """Every weight by canonical name, in the model's order, without padding."""
    model = dataclasses.replace(model, make_vocab_size_divisible_by=1, softmax_vocab_size=None)
    return model_spec(model, moe).weights()


def fused_parts(weights: Mapping[str, Weight]) -> dict[str, tuple[str, ...]]:
    """The parts of every fused weight, such as query, key and value, in their order."""
    return {
        name: weight.shard.parts
        for name, weight in weights.items()
        if weight.shard is not None and weight.shard.parts
    }
