"""Options of a run that come from the checkpoint of this program in --load.

Owns which options of the saved run replace the command line's: the model's (--use-checkpoint-args,
or none given), the tokenizer's (none given) and the schedule's
(--use-checkpoint-opt_param-scheduler). Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ds import schedules
from megatron_ds.checkpoint.compatibility import (
    CHANGEABLE_FIELDS,
    LR_FIELDS,
    ROPE_FIELDS,
    saved_config,
)
from megatron_ds.checkpoint.metadata import TOKENIZER, Checkpoint
from megatron_ds.config import GROUP_OF_FIELD, MODEL_SIZE_FIELDS, Config, fields_that_decide
from megatron_ds.config.fields import Decides, no_effect_problem, with_tuples
from megatron_ds.config.options.schedule import SCHEDULE_LENGTHS, SCHEDULE_UNITS
from megatron_ds.config.phases import fields_of_phases
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.engine.ds_config.fields import as_flag, field_value
from megatron_ds.tokenizer.stored_files import with_copies

Warn = Callable[[Problem], None]
SAVED_GROUPS = ("model", "moe", "tokenizer")
"""Groups whose settings a run reads from the checkpoint."""
TOKENIZER_FIELDS = fields_that_decide(Decides.TOKENS)
"""Settings that the tokenizer determines."""


def with_saved_options(config: Config, saved: Checkpoint, warn: Warn) -> Config:
    """Takes options of model and tokenizer from a checkpoint of this program.

    Args:
        config: Configuration of the command line.
        saved: The checkpoint.
        warn: Called for each given option that is replaced.
    """
    config = _with_softmax_rows(config, saved)
    config = dataclasses.replace(config, published=saved.run.published)
    if config.checkpoint.use_checkpoint_args or config.given.isdisjoint(MODEL_SIZE_FIELDS):
        config = _with_model(config, saved, warn)
    if config.given.isdisjoint(vars(config.tokenizer)):
        config = _with_tokenizer(config, saved)
    return config


def with_saved_schedule(
    config: Config, checkpoint: Checkpoint, world_size: int, warn: Warn
) -> tuple[Config, list[Problem]]:
    """Takes the schedule of learning rate and weight decay from a checkpoint of this program.

    Args:
        config: Configuration of the command line, with the batch sizes of the DeepSpeed file.
        checkpoint: The checkpoint.
        world_size: Number of processes.
        warn: Called for each given option that is replaced.

    Returns:
        The configuration, and why it cannot have the schedule of the checkpoint.
    """
    name = "use_checkpoint_opt_param_scheduler"
    if config.checkpoint.finetune:
        warn(no_effect_problem(name, "finetune", reason="with a new run"))
        return config, []
    saved = saved_config(checkpoint)
    values = {field: field_value(saved, field) for field in LR_FIELDS}
    problems: list[Problem] = []
    for stem in SCHEDULE_LENGTHS:
        fields = {f"{stem}_{unit}": None for unit in SCHEDULE_UNITS}
        defaults = {item.name: item.default for item in dataclasses.fields(config.schedule)}
        values |= {field: defaults[field] for field in fields}
        try:
            values |= _converted_length(config, world_size, saved, checkpoint, stem)
        except UserError as error:
            problems += error.problems
    return replace_given(config, values, checkpoint.path, warn, name), problems


def _converted_length(
    config: Config, world_size: int, saved: Config, checkpoint: Checkpoint, stem: str
) -> dict[str, int]:
    """A length of the saved schedule in a unit that the run allows, as value by field.

    Raises:
        UserError: If it is not an integer number of this run's iterations.
    """
    length = schedules.decay_as_given(saved) if stem == "lr_decay" else None
    length = length or schedules.given_length(saved, stem)
    if length is None:
        return {}
    unit = schedules.lr_unit(saved)
    value = schedules.in_lr_units(saved, length, checkpoint.run.layout.data_parallel_size)
    if unit == "samples" and config.schedule.train_iters is not None:
        dp_size = max(1, config.parallel.data_parallel_size(world_size))
        batch_size = max(1, config.final_global_batch_size(dp_size))
        if value % batch_size:
            raise user_error(
                "checkpoint-schedule-not-in-iterations",
                "use_checkpoint_opt_param_scheduler",
                "train_iters",
                path=checkpoint.path,
                length=f"{SCHEDULE_LENGTHS[stem]} is {value} samples",
                batch_size=batch_size,
            )
        unit = "iters"
        value = value // batch_size
    return {f"{stem}_{unit}": value}


def replace_given(
    config: Config, values: Mapping[str, Any], path: Path, warn: Warn, flag: str
) -> Config:
    """Replaces options by a checkpoint's; warns of given ones that change.

    Args:
        config: Configuration of the command line.
        values: Values by field.
        path: The checkpoint.
        warn: Called for each given option that is replaced.
        flag: Field of the flag that requests it.
    """
    for name, value in values.items():
        current = field_value(config, name)
        if name in config.given and current != value:
            texts = {"given": as_flag(name, current), "saved": as_flag(name, value)}
            warn(Problem("replaced-by-checkpoint", name, flag, path=path, **texts))
    origins = dict.fromkeys(values, f"from {path}")
    return dataclasses.replace(
        config.with_values(values),
        given=config.given - values.keys(),
        origins={**config.origins, **origins},
    )


def _with_softmax_rows(config: Config, checkpoint: Checkpoint) -> Config:
    """Repeats the rows over which the loss of a continued run of Megatron normalizes."""
    if "softmax_vocab_size" in config.given:
        return config
    rows = checkpoint.run.config["model"].get("softmax_vocab_size")
    return config.with_values({"softmax_vocab_size": rows})


def _with_model(config: Config, checkpoint: Checkpoint, warn: Warn) -> Config:
    """The model of the checkpoint.

    Given options are kept, and compared with the checkpoint's when it is checked; with
    --use-checkpoint-args only those that a run may change.
    """
    overridable = CHANGEABLE_FIELDS | (
        ROPE_FIELDS if config.checkpoint.override_rope else frozenset()
    )
    if not config.checkpoint.use_checkpoint_args:
        overridable = frozenset(GROUP_OF_FIELD)
    values = {
        name: value
        for group in ("model", "moe")
        for name, value in checkpoint.run.config.get(group, {}).items()
        if GROUP_OF_FIELD.get(name) == group
        and name not in TOKENIZER_FIELDS | fields_of_phases(config)
        and not (name in config.given and name in overridable)
    }
    return replace_given(config, with_tuples(values), checkpoint.path, warn, "use_checkpoint_args")


def _with_tokenizer(config: Config, checkpoint: Checkpoint) -> Config:
    """The tokenizer of the checkpoint, by its copy of the files, without permission to run code."""
    saved = with_copies(checkpoint.run.config["tokenizer"], checkpoint.path / TOKENIZER)
    known = {item.name for item in dataclasses.fields(config.tokenizer)}
    values = {name: value for name, value in saved.items() if name in known}
    config = config.with_values({**values, "trust_remote_code": False})
    if config.tokenizer.tokenizer_type == "NullTokenizer" and "vocab_size" not in config.given:
        # Its end-of-document id is not counted in --vocab-size.
        config = config.with_vocab(checkpoint.run.config["model"]["vocab_size"] - 1)
    return config
