"""Adam's states and settings of another trainer, as those of our weights.

Owns what is refused whatever the trainer is: states that are missing, of another shape or of
another optimizer, steps that differ, settings that Adam here does not have. Knows no files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.conversion.finite_tensors import finite
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values
from megatron_ds.conversion.source import (
    ADAM_SETTINGS,
    SavedRun,
    SourceCheckpoint,
    declared_weights,
)
from megatron_ds.conversion.step_settings import StepSettings
from megatron_ds.conversion.trainers.layout import Layout, Piece, TrainerNames, joined, layout_of
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders
from megatron_ds.model.declaration.architecture import is_state
from megatron_ds.parallel.weights import Weight

STEP = "step"
SHOWN = 3
"""Names of weights in a message."""
UNSUPPORTED = ("amsgrad", "maximize")
"""Settings of torch's Adam that change its steps."""


@dataclass(frozen=True)
class TheirAdam:
    """An optimizer of another trainer, by the trainer's names of weights."""

    states: Mapping[str, Mapping[str, TensorReader]]
    """States of each weight by name: `exp_avg`, `exp_avg_sq` and, unless `steps` has them, a scalar
    `step`."""
    groups: Mapping[str, Mapping[str, Any]]
    """Settings of each weight's group by torch's names: `lr`, the rate of the last or next step,
    `initial_lr`, `betas`, `eps`, `weight_decay`; empty if the files have none."""
    steps: Mapping[str, int] | None = None
    """Steps of each weight. None: the states have them."""


@dataclass(frozen=True)
class AdamOfRun:
    """Adam's states and settings, by our names of weights."""

    moments: Mapping[str, TensorReaders]
    """Full states by key and canonical name."""
    steps: int
    settings: StepSettings
    """Options and rates of the weights."""
    rate: float | None
    """Learning rate in the files, of weights with the largest maximum."""
    notes: Sequence[Problem] = ()
    """Warnings for the user."""


def adam_of_run(
    path: Path, settings: ModelSettings, names: TrainerNames, theirs: TheirAdam
) -> AdamOfRun:
    """Adam's states and settings of a run.

    Args:
        path: Folder of the checkpoint.
        settings: Options of the model, as of its weights.
        names: The trainer's names of weights.
        theirs: The trainer's states.

    Raises:
        UserError: If states are missing, unknown, of another shape or optimizer, or contradict each
            other.
    """
    weights = declared_weights(settings.model, settings.moe)
    layout = {
        name: pieces
        for name, pieces in layout_of(settings, names).items()
        if not is_state(weights[name])
    }
    if not settings.model.untie_embeddings_and_output_weights:
        theirs = _tied(theirs, names)
    _check_states(path, layout, theirs)
    _check_shapes(layout, weights, theirs)
    moments: dict[str, TensorReaders] = {}
    for key in MOMENTS:
        moments[key] = {
            name: joined(
                pieces,
                [finite(theirs.states[p.name][key], f"{key} of {p.name}", path) for p in pieces],
                weights[name],
            )
            for name, pieces in layout.items()
        }
    steps = _steps(path, theirs, [piece.name for piece in _pieces(layout)])
    if not theirs.groups:
        return AdamOfRun(moments, steps, StepSettings(), None)
    with malformed_values(path):
        settings_of_steps, rate = _settings(path, layout, theirs)
    coupled = any(
        group.get("decoupled_weight_decay") is False and group["weight_decay"]
        for group in theirs.groups.values()
    )
    notes = [Problem("foreign-decay-coupled", path=path)] if coupled else []
    return AdamOfRun(moments, steps, settings_of_steps, rate, notes)


def _settings(path: Path, layout: Layout, theirs: TheirAdam) -> tuple[StepSettings, float]:
    """Options and rates of the weights, and the learning rate in the files."""
    groups = [theirs.groups[piece.name] for piece in _pieces(layout)]
    options = _options(path, groups)
    peaks = _by_weight(path, layout, theirs, "learning rate", _peak)
    decays = _by_weight(path, layout, theirs, "weight decay", _decay)
    options |= {"lr": max(peaks.values()), "weight_decay": max(decays.values())}
    steps = StepSettings(options=options, lr=peaks, weight_decay=decays)
    return steps, float(max(groups, key=_peak)["lr"])


def _pieces(layout: Layout) -> Iterator[Piece]:
    for pieces in layout.values():
        yield from pieces


def _tied(theirs: TheirAdam, names: TrainerNames) -> TheirAdam:
    """The states of a model whose output layer is its embedding, under the name of this one."""
    head, table = (f"{names.outer[module]}.weight" for module in ("head", "embedding.word"))

    def renamed(values: Mapping[str, Any] | None) -> Any:
        if values is None or head not in values:
            return values
        others = {name: value for name, value in values.items() if name != head}
        return {table: values[head], **others}  # the embedding's own, if it has some

    return TheirAdam(renamed(theirs.states), renamed(theirs.groups), renamed(theirs.steps))


def _check_states(path: Path, layout: Layout, theirs: TheirAdam) -> None:
    """Checks the names of weights and of states."""
    needed = [*MOMENTS] if theirs.steps is not None else [*MOMENTS, STEP]
    weights = {piece.name for piece in _pieces(layout)}
    keys = {key for states in theirs.states.values() for key in states}
    other = sorted(keys - {*needed})
    if other or (keys and keys.isdisjoint(MOMENTS)):
        raise user_error("foreign-optimizer-other", path=path, states=", ".join(other or keys))
    problems = []
    missing = [
        f"{key} of {name}"
        for name in sorted(weights)
        for key in needed
        if key not in theirs.states.get(name, {})
    ]
    if missing:
        texts = {"names": _some(missing), "path": path}
        problems.append(Problem("foreign-states-missing", **texts))
    if unknown := sorted(theirs.states.keys() - weights):
        problems.append(Problem("foreign-states-unknown", path=path, names=_some(unknown)))
    if theirs.groups and (without := sorted(weights - theirs.groups.keys())):
        names = _some([f"the settings of {name}" for name in without])
        problems.append(Problem("foreign-states-missing", path=path, names=names))
    raise_if_any(problems)


def _check_shapes(layout: Layout, weights: Mapping[str, Weight], theirs: TheirAdam) -> None:
    """Checks the shapes of moments."""
    problems = []
    for name, pieces in layout.items():
        weight = weights[name]
        for piece in pieces:
            inner = weight.shape[2:] if weight.is_stacked else weight.shape[1:]
            expected = [piece.rows, *inner]
            if piece.expert is not None:
                expected = [weight.shape[0], *expected]
            for key in MOMENTS:
                shape = [*theirs.states[piece.name][key].shape]
                if shape != expected:
                    texts = {"name": f"{key} of {piece.name}", "shape": shape}
                    problems.append(Problem("weights-shape-mismatch", expected=expected, **texts))
    raise_if_any(problems)


def _steps(path: Path, theirs: TheirAdam, names: Iterable[str]) -> int:
    """The steps of all weights.

    Raises:
        UserError: If they differ, or are none.
    """
    counts = theirs.steps or {name: int(theirs.states[name][STEP].read()) for name in names}
    first = min(counts, key=lambda name: counts[name])
    last = max(counts, key=lambda name: counts[name])
    if counts[first] != counts[last]:
        texts = {"first": first, "few": counts[first], "last": last, "many": counts[last]}
        raise user_error("foreign-steps-differ", path=path, **texts)
    return counts[first]


def _options(path: Path, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The options that all weights have in common."""
    lacking = []
    values = set()
    for group in groups:
        lacking += [f"{key} {group[key]}" for key in UNSUPPORTED if group.get(key)]
        values.add((*map(float, group["betas"]), float(group["eps"])))
    if len(values) > 1:
        lacking.append("betas or an eps that differ between weights")
    if lacking:
        raise user_error("foreign-adam-lacking", path=path, parts=lacking[0])
    ((beta1, beta2, eps),) = values
    return {"adam_beta1": beta1, "adam_beta2": beta2, "adam_eps": eps}


def _peak(group: Mapping[str, Any]) -> float:
    """The maximum of a learning rate: `initial_lr` of torch's schedulers."""
    return float(group.get("initial_lr", group["lr"]))


def _decay(group: Mapping[str, Any]) -> float:
    return float(group["weight_decay"])


def _by_weight(
    path: Path,
    layout: Layout,
    theirs: TheirAdam,
    what: str,
    value_of: Callable[[Mapping[str, Any]], float],
) -> dict[str, float]:
    """A setting of each of our weights.

    Raises:
        UserError: If the parts of a weight that is fused here differ.
    """
    result = {}
    for name, pieces in layout.items():
        values = {value_of(theirs.groups[piece.name]) for piece in pieces}
        if len(values) > 1:
            parts = ", ".join(piece.name for piece in pieces)
            raise user_error("foreign-fused-rates-differ", path=path, names=parts, what=what)
        result[name] = values.pop()
    return result


def _some(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def with_run(source: SourceCheckpoint, adam: AdamOfRun, run: SavedRun) -> SourceCheckpoint:
    """A model with the optimizer of the run that trained it.

    Args:
        source: The model.
        adam: The optimizer.
        run: The run.

    Raises:
        UserError: If the states do not fit the model.
    """
    settings = None if run.settings is None else run.settings.options
    known = {name: value for name, value in (settings or {}).items() if name in ADAM_SETTINGS}
    run = dataclasses.replace(run, arguments={**known, "optimizer": "adam"})
    notes = (*source.notes, *adam.notes)
    complete = dataclasses.replace(source, optimizer=adam.moments, run=run, unread="", notes=notes)
    return complete.checked()
