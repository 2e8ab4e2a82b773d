"""The stages of a run: --stages, whose entries replace settings of the run one after the other.

An entry is a JSON object: the stage's name, and values by option field. `Config.stage_configs` has
the complete configuration of each stage.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ds.config.data_files import read_table
from megatron_ds.config.fields import exclusive_problem, with_tuples
from megatron_ds.config.options.data import EPOCHS, TRAINING_DATA
from megatron_ds.config.problems import Problem

if TYPE_CHECKING:
    from megatron_ds.config import Config

NAME = "name"
TABLES: dict[str, list[str]] = read_table(__file__)
OF_STAGE = frozenset(TABLES["of_stage"])
"""Fields that count from the start of a stage, and are set in stages only."""
CHANGEABLE = OF_STAGE.union(TABLES["changeable"])
"""Fields that a stage may set."""


def to_entry(name: str, values: Mapping[str, Any]) -> str:
    """An entry of --stages."""
    return json.dumps({NAME: name, **values})


def stage_names(config: Config) -> list[str]:
    """The names of the stages."""
    return [str(json.loads(entry)[NAME]) for entry in config.schedule.stages]


def values_of(entry: str) -> dict[str, Any]:
    """Values by field that an entry sets."""
    values = with_tuples(json.loads(entry))
    del values[NAME]
    return values


def fields_of_stages(config: Config) -> frozenset[str]:
    """The fields that some stage sets."""
    return frozenset(name for entry in config.schedule.stages for name in values_of(entry))


def resolved(config: Config) -> tuple[Config, ...]:
    """The configurations of the stages; without stages, the run's alone.

    The data of a stage replaces the run's, by whatever flag either is given.
    """
    return tuple(_with(config, values_of(entry)) for entry in config.schedule.stages) or (config,)


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    reset = {} if TRAINING_DATA.isdisjoint(values) else dict.fromkeys(TRAINING_DATA)
    replaced = {"stages", *reset, *values}
    return dataclasses.replace(
        config.with_values({"stages": (), **reset, **values}),
        given=config.given - replaced | values.keys(),
        origins={name: text for name, text in config.origins.items() if name not in replaced},
        start_samples=0,
    )


def by_stage(config: Config, check: Callable[[Config], Iterable[Problem]]) -> list[Problem]:
    """The problems of all stages. One that not all of them have names its stage."""
    of_stages = [list(check(stage)) for stage in config.stage_configs]
    common = set(of_stages[0]).intersection(*of_stages[1:])
    names = stage_names(config) or [""]
    return [
        *(problem for problem in of_stages[0] if problem in common),
        *(
            problem.with_prefix(f"stage {name}: ")
            for name, problems in zip(names, of_stages, strict=True)
            for problem in problems
            if problem not in common
        ),
    ]


def problems(config: Config) -> Iterator[Problem]:
    """Check the stages against the settings of the run and against each other."""
    schedule, defaults = config.schedule, type(config.schedule)()
    repeated = [name for name, count in Counter(stage_names(config)).items() if count > 1]
    if repeated:
        yield Problem("stage-names-repeated", names=", ".join(repeated))
    for name in TABLES["of_stage"]:
        if getattr(schedule, name) != getattr(defaults, name):
            yield Problem("set-outside-of-stages", name, "stages")
    if config.data.train_data_exact_num_epochs:
        yield exclusive_problem(EPOCHS, "stages", reason="both set the length of the run")
    if config.checkpoint.use_checkpoint_opt_param_scheduler:
        yield Problem("stages-with-saved-schedule")
    if "dataset" in config.custom_parts or config.data.mock_data:
        yield Problem("stages-with-own-dataset")
    models = [stage.model for stage in config.stage_configs]
    is_learned = models[0].position_embedding_type == "learned_absolute"
    if len({model.is_rotary or model.position_embedding_type for model in models}) > 1:
        yield Problem("stage-positions-differ", "position_embedding_type")
    elif is_learned and len({model.num_positions for model in models}) > 1:
        longest = max(model.num_positions for model in models)
        yield Problem("stage-position-tables-differ", longest=longest)
    if config.lengths_vary and config.recompute.contiguous_checkpointing:
        yield Problem("stage-lengths-with-contiguous-checkpointing")
