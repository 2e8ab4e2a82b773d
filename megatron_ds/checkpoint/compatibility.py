"""Compares a run with the checkpoint that it resumes from.

Owns which settings must equal the checkpoint's, and which may change with a warning. Values in
effect are compared: a default that is spelled out equals the default, and a flag without an effect
is not compared. Imports no torch, so a run that does not fit is rejected before it starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ds.checkpoint.metadata import (
    TOKENIZER,
    Checkpoint,
    DataOrder,
    ParallelLayout,
)
from megatron_ds.config import (
    GROUP_OF_FIELD,
    GROUPS,
    Config,
    ModelConfig,
    fields_that_decide,
    flag_of,
)
from megatron_ds.config.fields import Decides, with_tuples
from megatron_ds.config.options.data import SPLIT_DATA_FIELDS
from megatron_ds.config.options.optimizer_specs import is_bound_to_layout
from megatron_ds.config.options.schedule import SCHEDULE_LENGTHS, SCHEDULE_UNITS
from megatron_ds.config.phases import phase_names
from megatron_ds.config.problems import Problem, default_flag, option
from megatron_ds.engine.deepspeed.partitions import FlatPartition, ParameterPlace
from megatron_ds.engine.ds_config.generate import PARTITION_KEYS
from megatron_ds.tokenizer import TokenizerFingerprint

Parts = Mapping[str, Sequence[str]]
"""Names of the parts of fused parameters, in their order, by canonical name of the parameter."""
MODEL_FIELDS = frozenset(
    name for name, group in GROUP_OF_FIELD.items() if group in ("model", "moe")
)
ROPE_FIELDS = fields_that_decide(Decides.ROTATION)
"""Fields of base and scaling of rotary positions, which change with --override-rope."""
CHANGEABLE_FIELDS = MODEL_FIELDS - fields_that_decide(Decides.WEIGHTS) - ROPE_FIELDS
"""Fields of the model that do not change its weights, or only their padding."""
SCHEDULER_FIELDS = fields_that_decide(Decides.SCHEDULE)
"""Fields that --override-opt_param-scheduler takes from the command line without a warning."""
LR_FIELDS = SCHEDULER_FIELDS.difference(
    f"{stem}_{unit}" for stem in ("train", *SCHEDULE_LENGTHS) for unit in SCHEDULE_UNITS
)
"""Fields of the schedules of learning rate and weight decay, besides their lengths."""
ORDER_FIELDS = frozenset(item.name for item in dataclasses.fields(DataOrder))
CHANGEABLE_BATCH_SIZES = ORDER_FIELDS - fields_that_decide(Decides.SAMPLES)
"""Fields of the data's order that determine how many of the next samples a step takes, but not
which."""
LEARNED = (
    Decides.FUNCTION | Decides.TRAINING | Decides.SCHEDULE | Decides.CONTENT | Decides.ROTATION
)
REPORTED = fields_that_decide(LEARNED) - ORDER_FIELDS
"""Fields whose changes a resume reports. Fields of the data's order are compared as `DataOrder`."""


class Change(NamedTuple):
    """A setting with another value than the checkpoint's."""

    name: str
    label: str
    saved: Any
    now: Any


def resume_conflicts(checkpoint: Checkpoint, config: Config, dp_size: int) -> list[Problem]:
    """The settings of a run that contradict the checkpoint it would resume from."""
    if changed := _changed_phases(checkpoint, config):
        return changed
    config = _in_phase_of(checkpoint, config)
    run = checkpoint.run
    settings = config.to_dict()
    layout = ParallelLayout.of(config, dp_size)
    order = DataOrder.of(config, dp_size)
    path = checkpoint.path
    problems = []
    rope = rope_fields(config.model, saved_config(checkpoint).model)
    free = CHANGEABLE_FIELDS | fields_that_decide(Decides.TOKENS)  # vocab_size: see below
    for change in _changed_fields(checkpoint, config, MODEL_FIELDS):
        if change.name not in rope | free:
            texts = {"path": path, **change._asdict()}
            problems.append(Problem("resume-model-changed", change.name, **texts))
        elif change.name in rope and not config.checkpoint.override_rope:
            texts = {"path": path, **change._asdict()}
            problems.append(Problem("resume-rope-changed", change.name, "override_rope", **texts))
    before, after = (model.get("vocab_size") for model in (run.config["model"], settings["model"]))
    if all(problem.fields != ("max_position_embeddings",) for problem in problems):
        problems += _position_conflicts(checkpoint, config)
    if before != after:
        problems.append(Problem("resume-vocabulary-changed", saved=before, path=path, now=after))
    if not (config.checkpoint.finetune or config.checkpoint.no_load_optim):
        if not run.has_optimizer:
            names = "no_load_optim", "finetune"
            problems.append(Problem("checkpoint-without-optimizer", *names, path=path))
        problems += _layout_conflicts(checkpoint, layout)
    problems += _changed_part(checkpoint, config, "layer")
    if config.checkpoint.is_new_run:
        return problems
    problems += _changed_part(checkpoint, config, "dataset")
    data = run.config.get("data", {}), settings["data"]
    if (file := data[0].get("exclude_documents")) and not data[1]["exclude_documents"]:
        problems.append(Problem("resume-exclusion-missing", path=path, file=file))
    # Without --split in both runs, the blend history compares the document ranges instead.
    both_split = all(any(values.get(name) for name in SPLIT_DATA_FIELDS) for values in data)
    problems += [
        Problem("resume-data-order-changed", change.name, path=path, **change._asdict())
        for change in _changes(asdict(run.data_order), asdict(order))
        if change.name not in CHANGEABLE_BATCH_SIZES and (change.name != "split" or both_split)
    ]
    return problems


def _changed_phases(checkpoint: Checkpoint, config: Config) -> list[Problem]:
    """Whether the run lacks the phase of the checkpoint, or had others before it."""
    count = checkpoint.run.state.stage + 1
    now = phase_names(config)
    try:
        saved = phase_names(saved_config(checkpoint))[:count]
    except (TypeError, ValueError, LookupError):  # values of wrong types
        saved = []
    is_same = len(now) >= count and (saved or now[:count]) == now[:count]
    if is_same or not now or config.checkpoint.is_new_run:
        return []
    values = {"saved": ", ".join(saved) or "no stages", "now": ", ".join(now[:count])}
    return [Problem("resume-stages-changed", path=checkpoint.path, **values)]


def _in_phase_of(checkpoint: Checkpoint, config: Config) -> Config:
    """Configuration of the run in the phase of the checkpoint that it continues."""
    return config.in_phase(0 if config.checkpoint.is_new_run else checkpoint.run.state.stage)


def rope_fields(*models: ModelConfig) -> frozenset[str]:
    """Fields that --override-rope changes from one model to another: none unless all have rope."""
    if not all(model.is_rotary for model in models):
        return frozenset()
    lengths = {"seq_length"} if any(model.rope_ntk_factor for model in models) else set()
    return ROPE_FIELDS | lengths


def _position_conflicts(checkpoint: Checkpoint, config: Config) -> Iterator[Problem]:
    """Whether learned position embeddings have rows for the positions of the run."""
    rows = saved_config(checkpoint).model.num_positions
    now = config.model.num_positions
    if config.model.position_embedding_type == "learned_absolute" and rows != now:
        path = checkpoint.path
        model = config.model
        yield Problem("resume-positions-changed", settings=model, path=path, rows=rows)


def _layout_conflicts(checkpoint: Checkpoint, now: ParallelLayout) -> Iterator[Problem]:
    """Yields reasons against resharding the states of a checkpoint to a layout."""
    saved = checkpoint.run.layout
    path = checkpoint.path
    if saved.optimizer != now.optimizer:
        yield Problem("resume-optimizer-changed", saved=saved, path=path, now=now)
    elif is_bound_to_layout(saved.optimizer) and (changes := layout_changes(saved, now)):
        yield Problem("resume-8-bit-moments", path=path, changes="; ".join(changes))


def layout_changes(saved: ParallelLayout, now: ParallelLayout) -> list[str]:
    """Differences between two layouts, for messages."""
    return [
        f"{_words(name)} {_value(before)} -> {_value(after)}"
        for name, _, before, after in _changes(asdict(saved), asdict(now))
    ]


def _value(value: object) -> str:
    return "none" if value == "" else str(value)


def _words(name: str) -> str:
    """A field of the layout for a log line."""
    return f"zero_optimization.{name}" if name in PARTITION_KEYS else name.replace("_", " ")


def tokenizer_conflicts(checkpoint: Checkpoint, now: TokenizerFingerprint) -> Iterator[Problem]:
    """Whether a run's tokenizer gives other ids than the checkpoint's.

    A NullTokenizer matches any: it does not describe the ids in the data.
    """
    saved = checkpoint.run.tokenizer
    if saved is None or "NullTokenizer" in (saved.kind, now.kind) or saved.same_as(now):
        return
    yield Problem("resume-tokenizer-changed", checkpoint=checkpoint, now=now, copy=TOKENIZER)


def _changed_part(checkpoint: Checkpoint, config: Config, part: str) -> Iterator[Problem]:
    """Another function than the checkpoint's run had instead of the package's own."""
    before, after = (source.custom_parts.get(part) for source in (checkpoint.run, config))
    if before != after:
        saved = before or "the built-in one"
        now = after or "the built-in one"
        yield Problem("resume-part-changed", part=part, saved=saved, path=checkpoint.path, now=now)


def changed_settings(checkpoint: Checkpoint, config: Config, dp_size: int) -> list[Problem]:
    """Warnings of the changed settings that a resume allows and that affect training."""
    if config.checkpoint.finetune:
        return []
    config = _in_phase_of(checkpoint, config)
    path = checkpoint.path
    saved = checkpoint.run.data_order
    now = DataOrder.of(config, dp_size)
    order = _changes(asdict(saved), asdict(now))
    changes = [
        *_changed_fields(checkpoint, config, REPORTED),
        *(change for change in order if change.name in CHANGEABLE_BATCH_SIZES),
    ]
    if config.checkpoint.override_opt_param_scheduler:
        changes = [change for change in changes if change.name not in SCHEDULER_FIELDS]
    return [
        *_changed_part(checkpoint, config, "loss"),
        *(
            Problem("resume-setting-changed", change.name, path=path, **change._asdict())
            for change in changes
        ),
    ]


def partition_conflicts(
    checkpoint: Checkpoint, partitions: Sequence[FlatPartition]
) -> list[Problem]:
    """The problem of an optimizer that keeps other elements at the places of its flat tensors."""
    saved = checkpoint.run.partitions
    now = tuple(partitions)
    if saved == now:
        return []
    index = next(
        (index for index, (a, b) in enumerate(zip(saved, now, strict=False)) if a != b),
        min(len(saved), len(now)),
    )
    difference = (
        f"{len(saved)} flat tensors in the checkpoint, {len(now)} in this run"
        if len(saved) != len(now)
        else f"flat tensor {index}: {_difference(saved[index], now[index])}"
    )
    return [Problem("resume-partitions-changed", path=checkpoint.path, difference=difference)]


def part_conflicts(saved: Parts, current: Parts, path: Path) -> list[Problem]:
    """The fused parameters whose parts are not the model's, or in another order.

    Args:
        saved: Names of the parts by parameter, as the file declares them.
        current: The same of the model.
        path: The file, for the message.
    """
    return [
        Problem(
            "fused-parts-changed",
            name=name,
            saved=", ".join(saved[name]),
            path=path,
            now=", ".join(parts) or "none",
        )
        for name, parts in current.items()
        if saved.get(name) and tuple(saved[name]) != tuple(parts)
    ]


def _difference(saved: FlatPartition, now: FlatPartition) -> str:
    for one, other in zip(saved.parameters, now.parameters, strict=False):
        if one != other:
            return f"{_place(one)} in the checkpoint, {_place(other)} in this run"
    counts = [
        f"{len(partition.parameters)} parameters in {partition.size} elements per rank"
        for partition in (saved, now)
    ]
    return f"{counts[0]} in the checkpoint, {counts[1]} in this run"


def _place(parameter: ParameterPlace) -> str:
    return f"{parameter.name} {list(parameter.shape)} at {parameter.offset}"


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for name, value in now.items():
        before = saved.get(name)
        if before != value and (before == before or value == value):  # two NaN are equal
            old, new = ("the default" if item is None else item for item in (before, value))
            yield Change(name, _label(name), old, new)


def _changed_fields(
    checkpoint: Checkpoint, config: Config, names: Collection[str]
) -> Iterator[Change]:
    """Differences of the fields `names` that have an effect in both runs.

    A field that was not given in either run differs only as a consequence of another one.
    """
    runs = saved_config(checkpoint), config
    effective = [_effective_values(run) for run in runs]
    given_in = [_as_json(run.to_dict()) for run in runs]
    for group in GROUPS:
        before, now = (values[group] for values in effective)
        differing = {name for name, *_ in _changes(*(values[group] for values in given_in))}
        compared = differing & before.keys() & set(names)
        yield from _changes(before, {name: now[name] for name in now if name in compared})


def _effective_values(config: Config) -> dict[str, dict[str, Any]]:
    """Values in effect; all values if some of them are of wrong types."""
    try:
        return _as_json(config.effective_values())
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return _as_json(config.to_dict())


def _as_json(values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(values))
    return plain


def saved_config(checkpoint: Checkpoint) -> Config:
    """The configuration of the run that saved; fields that it did not know have their defaults."""
    return config_of(checkpoint.run.config)


def config_of(saved: Mapping[str, Mapping[str, Any]]) -> Config:
    """The configuration with values of `Config.to_dict`."""
    groups = {}
    for name, cls in GROUPS.items():
        known = {item.name for item in dataclasses.fields(cls)}
        values = {key: value for key, value in saved.get(name, {}).items() if key in known}
        groups[name] = cls(**with_tuples(values))
    return Config(**groups)


def _label(name: str) -> str:
    """A field's flag, unless the flag negates the field; the plain name of anything else."""
    return option(name) if name in GROUP_OF_FIELD and flag_of(name) == default_flag(name) else name
