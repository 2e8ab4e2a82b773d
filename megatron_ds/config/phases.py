"""The phases of a run: --stages, whose entries replace settings of the run one after the other.

An entry is a JSON object: the phase's name, and values by option field. `Config.phase_configs` has
the complete configuration of each phase.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ds.config.fields import InPhase, exclusive_problem, option_fields, with_tuples
from megatron_ds.config.options.data import EPOCHS, TRAINING_DATA
from megatron_ds.config.problems import Problem

if TYPE_CHECKING:
    from megatron_ds.config import Config

NAME = "name"


def to_entry(name: str, values: Mapping[str, Any]) -> str:
    """An entry of --stages."""
    return json.dumps({NAME: name, **values})


def phase_names(config: Config) -> list[str]:
    """The names of the phases."""
    return [str(json.loads(entry)[NAME]) for entry in config.schedule.stages]


def values_of(entry: str) -> dict[str, Any]:
    """Values by field that an entry sets."""
    values = with_tuples(json.loads(entry))
    del values[NAME]
    return values


def fields_of_phases(config: Config) -> frozenset[str]:
    """The fields that some phase sets."""
    return frozenset(name for entry in config.schedule.stages for name in values_of(entry))


def resolved_phases(config: Config) -> tuple[Config, ...]:
    """The configurations of the phases; without phases, the run's alone.

    The data of a phase replaces the run's, by whatever flag either is given.
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


def by_phase(config: Config, check: Callable[[Config], Iterable[Problem]]) -> list[Problem]:
    """The problems of all phases. One that not all of them have names its phase."""
    problems_by_phase = [list(check(phase)) for phase in config.phase_configs]
    common = set(problems_by_phase[0]).intersection(*problems_by_phase[1:])
    names = phase_names(config) or [""]
    return [
        *(problem for problem in problems_by_phase[0] if problem in common),
        *(
            problem.with_prefix(f"stage {name}: ")
            for name, problems in zip(names, problems_by_phase, strict=True)
            for problem in problems
            if problem not in common
        ),
    ]


def phase_problems(config: Config) -> Iterator[Problem]:
    """Check the phases against the settings of the run and against each other."""
    schedule = config.schedule
    repeated = [name for name, count in Counter(phase_names(config)).items() if count > 1]
    if repeated:
        yield Problem("stage-names-repeated", names=", ".join(repeated))
    for item, spec in option_fields(schedule):
        if spec.in_phase is InPhase.COUNTED and getattr(schedule, item.name) != item.default:
            yield Problem("set-outside-of-stages", item.name, "stages")
    if config.data.train_data_exact_num_epochs:
        yield exclusive_problem(EPOCHS, "stages", reason="both set the length of the run")
    if config.checkpoint.use_checkpoint_opt_param_scheduler:
        yield Problem("stages-with-saved-schedule")
    if "dataset" in config.custom_parts or config.data.mock_data:
        yield Problem("stages-with-own-dataset")
    models = [phase.model for phase in config.phase_configs]
    is_learned = models[0].position_embedding_type == "learned_absolute"
    if len({model.is_rotary or model.position_embedding_type for model in models}) > 1:
        yield Problem("stage-positions-differ", "position_embedding_type")
    elif is_learned and len({model.num_positions for model in models}) > 1:
        longest = max(model.num_positions for model in models)
        yield Problem("stage-position-tables-differ", longest=longest)
    if config.lengths_vary and config.recompute.contiguous_checkpointing:
        yield Problem("stage-lengths-with-contiguous-checkpointing")
