"""Contents of a checkpoint of any format, opened without reading its tensors.

Owns the description that `tools/inspect_checkpoint.py` shows and by which two checkpoints are
compared. Prints nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.metadata import Checkpoint
from megatron_ds.config import GROUPS
from megatron_ds.config.problems import ignore
from megatron_ds.conversion.inspect.verify import files_of
from megatron_ds.conversion.registry import AUTO, Warn, recognize
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.engine.states.state_reader import VOCABULARY_TABLES, TensorReaders

WEIGHT = "weight"
"""Kind of the model's weights; the other kinds are the optimizer's states."""
PROCESS_GROUPS = frozenset(
    {"checkpoint", "evaluation", "logging", "profiling", "runtime", "stopping"}
)
"""Groups of settings that do not describe what is in a checkpoint."""


COUNTERS = ("iteration", "consumed_samples", "applied_samples")


@dataclass(frozen=True)
class SourcePosition:
    """Progress of a run in a source of its training data."""

    name: str
    samples: int
    weight: float | None
    """Weight in the current blend; None if the source has left it."""


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint whose tensors are read on demand."""

    path: Path
    """The folder of the checkpoint itself, not a --save folder around it."""
    format: str
    tensors: Mapping[str, TensorReaders]
    """Full tensors by canonical name, without padding of the vocabulary, for each kind of
    tensor."""
    settings: Mapping[str, Mapping[str, Any]]
    """Values by group; of a training run those that are not the default."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Counters of the run; empty for weights alone."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """States of the optimizer that are not tensors: steps, loss scale."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    data: tuple[SourcePosition, ...] = ()
    shards: Mapping[str, str] = field(default_factory=dict)
    """Sharding of weights by name; absent for one that is stored as a full tensor."""

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file, by path in the folder."""
        return files_of(self.path)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors[WEIGHT].values())


def open_checkpoint(path: Path, name: str = AUTO, warn: Warn = ignore) -> CheckpointSummary:
    """Opens the checkpoint in a folder, or the one that its pointers name.

    Names and sizes of files are checked, but no checksums.

    Args:
        path: The folder.
        name: Its format; "auto" recognizes it.
        warn: Called with each warning.

    Raises:
        UserError: If the folder has another format, is damaged, or has parts that the model lacks.
    """
    options = ReadOptions(warn=warn, optimizer=True, checksums=False)
    source = recognize(path, name).open(path, options)
    for note in source.notes:
        warn(f"WARNING: {note.render()}")
    # Universal checkpoints and ZeRO 3 store master weights here.
    weights = source.weights().to(source.precision)
    opened = CheckpointSummary(
        path=source.path,
        format=source.format,
        tensors={WEIGHT: weights.tensors, **_states_of(source, weights)},
        settings=_settings_of(source),
        progress=_known({name: getattr(source.run, name, None) for name in COUNTERS}),
        scalars=_known({"steps": source.run.steps, **source.run.scalars} if source.run else {}),
    )
    return opened if source.native is None else _with_run(opened, source.native, weights)


def _states_of(source: SourceCheckpoint, weights: SourceCheckpoint) -> dict[str, TensorReaders]:
    """States of the optimizer, in the order and with the rows of the weights."""
    return {
        key: {
            name: states[name].first_rows(weight.shape[0])
            if name in VOCABULARY_TABLES
            else states[name]
            for name, weight in weights.tensors.items()
            if name in states
        }
        for key, states in source.optimizer.items()
    }


def _settings_of(source: SourceCheckpoint) -> dict[str, Mapping[str, Any]]:
    settings = source.settings
    model = {**settings.defaults, **settings.fixed}
    return {"model": model, "tokenizer": settings.tokenizer, "special ids": settings.special_ids}


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _with_run(
    opened: CheckpointSummary, checkpoint: Checkpoint, weights: SourceCheckpoint
) -> CheckpointSummary:
    """Additions from the record of a run of this program."""
    run = checkpoint.run
    return dataclasses.replace(
        opened,
        settings={
            group: _changed(group, values)
            for group, values in run.config.items()
            if group not in PROCESS_GROUPS
        },
        progress=run.state.to_dict(),
        layout=dataclasses.asdict(run.layout),
        data=() if run.data is None else _positions(run.data),
        shards={} if checkpoint.is_universal else _shards_of(checkpoint, weights),
    )


def _changed(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group that are not the default."""
    defaults = (
        json.loads(json.dumps(dataclasses.asdict(GROUPS[group]()))) if group in GROUPS else {}
    )
    return {name: value for name, value in values.items() if value != defaults.get(name)}


def _positions(history: BlendHistory) -> tuple[SourcePosition, ...]:
    current = history.current
    weights = dict(zip(current.sources, current.weights, strict=True))
    return tuple(
        SourcePosition(source.identity.name, source.all_consumed, weights.get(index))
        for index, source in enumerate(history.sources)
    )


def _shards_of(checkpoint: Checkpoint, source: SourceCheckpoint) -> dict[str, str]:
    """Number and shape of the shards of each sharded weight."""
    layout = checkpoint.run.layout
    run = checkpoint.run
    shards = {}
    for name, tensor in source.tensors.items():
        words = []
        shape = list(tensor.shape)
        if name in run.experts and layout.expert_model_parallel_size > 1:
            shape[0] //= layout.expert_model_parallel_size
            words.append(f"expert parallel {layout.expert_model_parallel_size}")
        if name in run.shards and layout.tensor_model_parallel_size > 1:
            dim = run.shards[name].dim
            sections = run.shards[name].sections
            # The stored table has the padding of the vocabulary.
            shape[dim] = sum(sections) // layout.tensor_model_parallel_size
            words.append(f"tensor parallel {layout.tensor_model_parallel_size}")
        if words:
            shards[name] = f"{' x '.join(words)} x {shape}"
    return shards
