"""Compares a run with the checkpoint that it resumes from.

Owns which settings must equal the checkpoint's, and which may change with a warning. Values in
effect are compared: a default that is spelled out equals the default, and a flag without an effect
is not compared. Imports no torch, so a run that does not fit is rejected before it starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ds.checkpoint.metadata import (
    TOKENIZER,
    Checkpoint,
    DataOrder,
    ParallelLayout,
)
from megatron_ds.config import GROUP_OF_FIELD, GROUPS, Config, ModelConfig, flag_of
from megatron_ds.config.data_files import read_table
from megatron_ds.config.fields import with_tuples
from megatron_ds.config.options.data import SPLIT_DATA_FIELDS
from megatron_ds.config.options.optimizer import EIGHT_BIT
from megatron_ds.config.options.schedule import SCHEDULE_LENGTHS, SCHEDULE_UNITS
from megatron_ds.config.problems import Problem, default_flag, option
from megatron_ds.config.stages import stage_names
from megatron_ds.engine.deepspeed.partitions import FlatPartition, ParameterPlace
from megatron_ds.engine.ds_config.generate import PARTITION_KEYS
from megatron_ds.tokenizer import TokenizerFingerprint

Parts = Mapping[str, Sequence[str]]
"""Names of the parts of fused parameters, in their order, by canonical name of the parameter."""
TABLES: dict[str, list[str]] = read_table(__file__)
CHANGEABLE_MODEL_FIELDS = frozenset(TABLES["changeable_model"])
"""Fields of the model that may change on a resume."""
CHANGEABLE_MOE_FIELDS = frozenset(TABLES["changeable_moe"])
"""Changeable fields of a mixture of experts."""
CHANGEABLE_FIELDS = CHANGEABLE_MODEL_FIELDS.union(CHANGEABLE_MOE_FIELDS, TABLES["changeable_sizes"])
"""Fields of the model that do not change its weights, or only their padding."""
ROPE_FIELDS = frozenset(TABLES["rope"])
"""Fields of base and scaling of rotary positions, which change with --override-rope."""
VOCABULARY, CHANGEABLE_BATCH_SIZES = TABLES["vocabulary"], TABLES["batch_sizes"]
LR_FIELDS = TABLES["scheduler"]
"""Fields of the schedules of learning rate and weight decay, besides their lengths."""
SCHEDULER_FIELDS = frozenset(LR_FIELDS).union(
    f"{stem}_{unit}" for stem in ("train", *SCHEDULE_LENGTHS) for unit in SCHEDULE_UNITS
)
"""Fields that --override-opt_param-scheduler takes from the command line without a warning."""
UNREPORTED = frozenset([*TABLES["unreported"], *VOCABULARY, *CHANGEABLE_BATCH_SIZES])
"""Fields of the reported groups that do not change what a step computes, or are compared
otherwise."""


class Change(NamedTuple):
    """A setting with another value than the checkpoint's."""

    name: str
    label: str
    saved: Any
    now: Any


def resume_conflicts(checkpoint: Checkpoint, config: Config, dp_size: int) -> list[Problem]:
    """The settings of a run that contradict the checkpoint it would resume from."""
    if changed := _changed_stages(checkpoint, config):
        return changed
    config = _in_stage_of(checkpoint, config)
    run, settings = checkpoint.run, config.to_dict()
    layout, order = ParallelLayout.of(config, dp_size), DataOrder.of(config, dp_size)
    path, fixed = checkpoint.path, CHANGEABLE_FIELDS.union(VOCABULARY)
    problems = []
    rope = rope_fields(config.model, saved_config(checkpoint).model)
    for change in _changed_fields(checkpoint, config, ("model", "moe")):
        if change.name not in rope | fixed:
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


def _changed_stages(checkpoint: Checkpoint, config: Config) -> list[Problem]:
    """Whether the run lacks the stage of the checkpoint, or had others before it."""
    count, now = checkpoint.run.state.stage + 1, stage_names(config)
    try:
        saved = stage_names(saved_config(checkpoint))[:count]
    except (TypeError, ValueError, LookupError):  # values of wrong types
        saved = []
    is_same = len(now) >= count and (saved or now[:count]) == now[:count]
    if is_same or not now or config.checkpoint.is_new_run:
        return []
    values = {"saved": ", ".join(saved) or "no stages", "now": ", ".join(now[:count])}
    return [Problem("resume-stages-changed", path=checkpoint.path, **values)]


def _in_stage_of(checkpoint: Checkpoint, config: Config) -> Config:
    """The configuration of the run in the stage of the checkpoint, from which it continues."""
    return config.in_stage(0 if config.checkpoint.is_new_run else checkpoint.run.state.stage)


def rope_fields(*models: ModelConfig) -> frozenset[str]:
    """Fields that --override-rope changes from one model to another: none unless all have rope."""
    if not all(model.is_rotary for model in models):
        return frozenset()
    lengths = {"seq_length"} if any(model.rope_ntk_factor for model in models) else set()
    return ROPE_FIELDS | lengths


def _position_conflicts(checkpoint: Checkpoint, config: Config) -> Iterator[Problem]:
    """Whether learned position embeddings have rows for the positions of the run."""
    rows, now = saved_config(checkpoint).model.num_positions, config.model.num_positions
    if config.model.position_embedding_type == "learned_absolute" and rows != now:
        path, model = checkpoint.path, config.model
        yield Problem("resume-positions-changed", settings=model, path=path, rows=rows)


def _layout_conflicts(checkpoint: Checkpoint, now: ParallelLayout) -> Iterator[Problem]:
    """Yields reasons against resharding the states of a checkpoint to a layout."""
    saved, path = checkpoint.run.layout, checkpoint.path
    if saved.optimizer != now.optimizer:
        yield Problem("resume-optimizer-changed", saved=saved, path=path, now=now)
    elif saved.optimizer == EIGHT_BIT and (changes := layout_changes(saved, now)):
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
        saved, now = before or "the built-in one", after or "the built-in one"
        yield Problem("resume-part-changed", part=part, saved=saved, path=checkpoint.path, now=now)


def changed_settings(checkpoint: Checkpoint, config: Config, dp_size: int) -> list[Problem]:
    """Warnings of the changed settings that a resume allows and that affect training."""
    if config.checkpoint.finetune:
        return []
    config = _in_stage_of(checkpoint, config)
    path, saved, now = checkpoint.path, checkpoint.run.data_order, DataOrder.of(config, dp_size)
    model = {name for name in GROUP_OF_FIELD if GROUP_OF_FIELD[name] in ("model", "moe")}
    changes = [
        change
        for change in _changed_fields(checkpoint, config, TABLES["reported_groups"])
        if change.name not in UNREPORTED | (model - CHANGEABLE_FIELDS - ROPE_FIELDS)
        and (GROUP_OF_FIELD.get(change.name) != "data" or change.name in TABLES["reported_data"])
    ]
    order = _changes(asdict(saved), asdict(now))
    changes += [change for change in order if change.name in CHANGEABLE_BATCH_SIZES]
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
    saved, now = checkpoint.run.partitions, tuple(partitions)
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
    checkpoint: Checkpoint, config: Config, groups: Iterable[str]
) -> Iterator[Change]:
    """Differences of the fields of some groups that have an effect in both runs.

    A field that was not given in either run differs only as a consequence of another one.
    """
    runs = saved_config(checkpoint), config
    effective = [_effective_values(run) for run in runs]
    given_in = [_as_json(run.to_dict()) for run in runs]
    for group in groups:
        before, now = (values[group] for values in effective)
        differing = {name for name, *_ in _changes(*(values[group] for values in given_in))}
        kept = {name: now[name] for name in now if name in differing & before.keys()}
        yield from _changes(before, kept)


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
