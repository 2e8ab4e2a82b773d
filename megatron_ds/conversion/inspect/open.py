"""What a checkpoint of any format contains, opened without reading its tensors.

Owns the description that `tools/inspect_checkpoint.py` shows and by which two checkpoints are
compared. Prints nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_ds.checkpoint import metadata, selection
from megatron_ds.checkpoint.metadata import EIGHT_BIT, RUN, CheckpointMetadata
from megatron_ds.checkpoint.tensor_reader import LazyTensor, LazyTensors
from megatron_ds.checkpoint.universal.folders import list_universal
from megatron_ds.checkpoint.universal.reader import open_states
from megatron_ds.config import GROUPS
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.conversion.megatron import open as megatron
from megatron_ds.conversion.megatron.detect import find_checkpoint
from megatron_ds.conversion.native import is_native, source_of
from megatron_ds.conversion.registry import AUTO, recognize
from megatron_ds.conversion.source import WeightsSource
from megatron_ds.conversion.universal import is_own_universal, universal_source
from megatron_ds.conversion.weights_folder import open_weights_folder
from megatron_ds.conversion.weights_locations import is_weights_folder
from megatron_ds.data.blend_history import BlendHistory
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, FullStates

WEIGHT = "weight"
"""Kind of the model's weights; the other kinds are those of the optimizer's states."""
PROCESS_GROUPS = frozenset({"checkpoint", "logging", "runtime"})
"""Groups of settings that do not describe what is in a checkpoint."""

Warn = Callable[[str], None]


@dataclass(frozen=True)
class SourcePosition:
    """How far a run has read a source of its training data."""

    name: str
    samples: int
    weight: float | None
    """In the current blend; None if the source has left it."""


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose tensors are read on demand."""

    path: Path
    """The folder of the checkpoint itself, not a --save folder around it."""
    format: str
    tensors: Mapping[str, LazyTensors]
    """By kind: full tensors by canonical name, without padding of the vocabulary."""
    settings: Mapping[str, Mapping[str, Any]]
    """Values by group; of a training run those that are not the default."""
    progress: Mapping[str, Any] = field(default_factory=dict)
    """Counters of the run; empty for weights alone."""
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """States of the optimizer that are no tensors: steps, loss scale."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    data: tuple[SourcePosition, ...] = ()
    shards: Mapping[str, str] = field(default_factory=dict)
    """How a weight is sharded, by name; absent for one that is stored as a full tensor."""
    metrics: Path | None = None
    """File with the loss curve of the run, which may not exist."""

    @property
    def files(self) -> dict[str, int]:
        """Bytes of each file, by path in the folder."""
        found = sorted(path for path in self.path.rglob("*") if path.is_file())
        return {path.relative_to(self.path).as_posix(): path.stat().st_size for path in found}

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors[WEIGHT].values())


def open_checkpoint(
    path: Path, name: str = AUTO, warn: Warn = lambda text: None
) -> OpenedCheckpoint:
    """Opens the checkpoint in a folder, or the one that its pointers name.

    Names and sizes of files are checked, but no checksums.

    Args:
        path: The folder.
        name: Its format; "auto" recognizes it.
        warn: Called with each warning.

    Raises:
        UserError: If the folder has another format, is damaged, or has parts that the model lacks.
    """
    found = recognize(path, name)
    if found.recognizes is is_native:
        return _open_training(select(path, warn), warn)
    if found.recognizes is is_own_universal:
        return _open_training(select_universal(path), warn)
    if found.open is megatron.open_megatron:
        return _open_megatron(path, found.name, warn)
    is_folder = found.recognizes is is_weights_folder
    source = open_weights_folder(path) if is_folder else found.open(path, warn)
    return OpenedCheckpoint(source.path, source.format, _kinds(source), _settings_of(source))


def select(path: Path, warn: Warn) -> CheckpointMetadata:
    """The training checkpoint of a folder; names and sizes of its files are checked.

    Args:
        path: A --save folder, of which the checkpoint is taken that a run would load, or the
            folder of one checkpoint.
        warn: Called with a line for each one that is skipped.

    Raises:
        UserError: If there is none.
    """
    if (path / RUN).is_file():
        listing = selection.CheckpointListing(path, (path,))
    else:
        listing = selection.list_folder(path)
    found = selection.select_checkpoint(
        listing, None, metadata.find_damage, lambda each: warn(f"WARNING: {each.render()}")
    )
    assert found is not None
    return found


def select_universal(path: Path) -> CheckpointMetadata:
    """The universal checkpoint that the pointer of a folder names, or the folder's own.

    Raises:
        UserError: If names or sizes of its files are wrong.
    """
    found = list_universal(path)
    if not found:
        raise user_error("universal-missing", folder=path)
    if (damage := metadata.find_damage(found[0])) is not None:
        raise user_error("checkpoint-damaged", path=found[0], damage=damage, hint="")
    return metadata.read_run(found[0])


def _open_training(found: CheckpointMetadata, warn: Warn) -> OpenedCheckpoint:
    """A checkpoint of a training run, of any layout or universal."""
    run = found.run
    has_optimizer = run.has_optimizer and run.layout.optimizer != EIGHT_BIT
    if run.has_optimizer and not has_optimizer:
        warn(f"WARNING: {Problem('checkpoint-8-bit-moments-unread', path=found.path).render()}")
    with _readable(found.path):
        source = universal_source(found) if found.is_universal else source_of(found)
        # Of a universal checkpoint, and from ZeRO 3, they are the master weights.
        source = source.to(source.precision)
        states = open_states(found, has_optimizer=has_optimizer)
        tensors = {**_kinds(source), **_states_of(states, source)}
        scalars = _scalars_of(states)
    return OpenedCheckpoint(
        path=found.path,
        format=source.format,
        tensors=tensors,
        settings={
            group: _changed(group, values)
            for group, values in run.config.items()
            if group not in PROCESS_GROUPS
        },
        progress=run.state.to_dict(),
        scalars=scalars,
        layout=dataclasses.asdict(run.layout),
        data=() if run.data is None else _positions(run.data),
        shards={} if found.is_universal else _shards_of(found, source),
        metrics=_metrics_of(found),
    )


def _states_of(states: FullStates, source: WeightsSource) -> dict[str, LazyTensors]:
    """Master weights and moments, in the order and with the rows of the weights."""
    found: dict[str, dict[str, LazyTensor]] = {}
    for name in source.tensors:
        shape = states.shapes[name]
        rows = shape[:1]
        if name in VOCABULARY_TABLES:  # without padding
            rows = source.tensors[name].shape[:1]
        for kind in (MASTER, *states.moments(name)):
            dtype = states.read(name, kind, range(1)).dtype
            read = partial(_read_state, states, source.path, name, kind, range(*rows))
            found.setdefault(kind, {})[name] = LazyTensor((*rows, *shape[1:]), dtype, read)
    return dict(found)


def _read_state(states: FullStates, path: Path, name: str, kind: str, rows: range) -> Tensor:
    with _readable(path):
        return states.read(name, kind, rows)


def _scalars_of(states: FullStates) -> dict[str, Any]:
    steps = {states.steps(name) for name in states.shapes} - {None}
    found: dict[str, Any] = {}
    if steps:
        found["steps"] = steps.pop() if len(steps) == 1 else sorted(map(int, map(str, steps)))
    if (scaler := states.loss_scaler) is not None:
        found["loss_scale"] = float(scaler.cur_scale)
    return found


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
        SourcePosition(source.identity.name, source.all_consumed, weights.get(number))
        for number, source in enumerate(history.sources)
    )


def _shards_of(found: CheckpointMetadata, source: WeightsSource) -> dict[str, str]:
    """Number and shape of the shards of each sharded weight."""
    layout, run = found.run.layout, found.run
    shards = {}
    for name, tensor in source.tensors.items():
        words = []
        shape = list(tensor.shape)
        if name in run.experts and layout.expert_model_parallel_size > 1:
            shape[0] //= layout.expert_model_parallel_size
            words.append(f"expert parallel {layout.expert_model_parallel_size}")
        if name in run.shards and layout.tensor_model_parallel_size > 1:
            dim, sections = run.shards[name].dim, run.shards[name].sections
            # The stored table has the padding of the vocabulary.
            shape[dim] = sum(sections) // layout.tensor_model_parallel_size
            words.append(f"tensor parallel {layout.tensor_model_parallel_size}")
        if words:
            shards[name] = f"{' x '.join(words)} x {shape}"
    return shards


def _metrics_of(found: CheckpointMetadata) -> Path:
    given = found.run.config.get("logging", {}).get("metrics_jsonl")
    return Path(given) if isinstance(given, str) else found.path.parent / "metrics.jsonl"


def _open_megatron(path: Path, name: str, warn: Warn) -> OpenedCheckpoint:
    """A checkpoint of Megatron-LM, Megatron Core or a fork, with its optimizer's states."""
    found = find_checkpoint(path)
    if found is None:
        raise user_error("weights-format-unknown", path=path, known=name)
    model = megatron.open_checkpoint(found)
    for note in model.notes:
        warn(f"WARNING: {note.render()}")
    source = model.source.checked()
    tensors = _kinds(source)
    for kind, states in model.optimizer.items():
        tensors[kind] = {
            each: states[each].first_rows(source.tensors[each].shape[0])
            if each in VOCABULARY_TABLES
            else states[each]
            for each in source.tensors
            if each in states
        }
    progress = {
        "iteration": model.iteration,
        "consumed_samples": model.consumed_samples,
        "applied_samples": model.applied_samples,
    }
    return OpenedCheckpoint(
        path=found.path,
        format=found.kind,
        tensors=tensors,
        settings=_settings_of(source),
        progress={key: value for key, value in progress.items() if value is not None},
        scalars={} if model.steps is None else {"steps": model.steps},
    )


def _kinds(source: WeightsSource) -> dict[str, LazyTensors]:
    return {WEIGHT: source.tensors}


def _settings_of(source: WeightsSource) -> dict[str, Mapping[str, Any]]:
    settings = source.settings
    model = {**settings.defaults, **settings.fixed}
    return {"model": model, "tokenizer": settings.tokenizer, "special ids": settings.special_ids}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Reports files whose contents do not fit run.json, as of a manipulated checkpoint."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, LookupError, RuntimeError) as error:
        what = f"its files do not fit its {RUN}: {error!r}"
        raise user_error("checkpoint-states-unreadable", path=path, error=what) from error
