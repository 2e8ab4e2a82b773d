"""What a run takes over of the steps of another trainer's run that it continues.

Owns which of its options come from there, what contradicts them, and what cannot be taken over.
Imports no torch unless there is such a checkpoint.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from megatron_ds import schedules
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.fields import as_flag, field_value
from megatron_ds.loading.initial_load import continued_state
from megatron_ds.loading.options_from_checkpoint import Warn
from megatron_ds.train_state import TrainState

if TYPE_CHECKING:
    from megatron_ds.conversion.source import SourceCheckpoint
    from megatron_ds.conversion.step_settings import StepSettings

GROUPS = ("param_group", "embedding_weight_decay", "decoupled_lr")
"""Options of rates of single weights."""
BATCH = "global_batch_size"
COMPARED = 20_000
"""Steps whose learning rates are all compared; of longer runs, some of them first."""


def take_over(config: Config, source: SourceCheckpoint, warn: Warn) -> Config:
    """Fills in what the files of a run state of its steps, unless it is given.

    Args:
        config: Configuration of the command line.
        source: The checkpoint.
        warn: Called with what was filled in, which the next resume needs as flags.
    """
    saved = _settings_of(source, config)
    if saved is None:
        return config
    values = {name: value for name, value in saved.options.items() if name not in config.given}
    filled = config.with_values(values)
    if config.given.isdisjoint(GROUPS) and saved.lr:
        from megatron_ds.conversion.trainers.runs.weight_rates import param_groups

        settings = source.settings
        groups = param_groups(saved, settings.model, settings.moe, filled.optimizer)
        if groups:
            values["param_group"] = groups
            filled = config.with_values(values)
    names = [name for name in values if field_value(config, name) != field_value(filled, name)]
    if names:
        flags = " ".join(_words(name, values[name]) for name in names)
        warn(Problem("steps-taken-over", *names, path=source.path, flags=flags))
    origins = dict.fromkeys(values, f"from {source.path}")
    return dataclasses.replace(filled, origins={**config.origins, **origins})


def with_samples(source: SourceCheckpoint, config: Config, world_size: int) -> SourceCheckpoint:
    """The checkpoint with the samples of its run, if its files state only the steps.

    Args:
        source: The checkpoint.
        config: Configuration with the batch sizes.
        world_size: Number of processes.
    """
    run = source.run
    if run is None or run.settings is None or run.consumed_samples is not None:
        return source
    dp_size = config.parallel.data_parallel_size(world_size)
    consumed = _samples_of(config, run.iteration, dp_size)
    run = dataclasses.replace(run, consumed_samples=consumed)
    return dataclasses.replace(source, run=run)


def _samples_of(config: Config, steps: int, dp_size: int) -> int:
    """Samples of the first steps of a run with these batch sizes."""
    schedule = config.schedule
    if not (schedule.rampup_batch_size or schedule.batch_size_steps):
        return steps * config.final_global_batch_size(dp_size)
    samples = 0
    for _ in range(steps):
        tokens = samples * config.model.seq_length
        samples += schedules.batch_size_at(config, samples, tokens, dp_size)
    return samples


def step_conflicts(source: SourceCheckpoint, config: Config, dp_size: int) -> Iterator[Problem]:
    """Yields reasons that the next steps would not be those of the run that saved a checkpoint.

    Args:
        source: The checkpoint, with its samples.
        config: Complete configuration.
        dp_size: Data-parallel size.
    """
    yield from _batch_conflicts(source, config)
    saved = _settings_of(source, config)
    state = continued_state(source, config)
    if saved is None or state is None or config.checkpoint.override_opt_param_scheduler:
        return
    from megatron_ds.conversion.trainers.runs.weight_rates import options_differ

    path = source.path
    differing = [
        name
        for name, value in saved.options.items()
        if name != BATCH and options_differ(value, field_value(config, name))
    ]
    for name in differing:
        flag = as_flag(name, field_value(config, name))
        expected = as_flag(name, saved.options[name])
        yield Problem("step-setting-differs", name, path=path, now=flag, saved=expected)
    yield from _weight_conflicts(source, saved, config)
    if "lr" in differing:
        return
    for iteration, rate in saved.rates.items():
        now = _rate_at(config, state, iteration - source_iteration(source), dp_size)
        if options_differ(rate, now):
            texts = {"saved": f"{rate:.9g}", "now": f"{now:.9g}", "hint": _hint(saved)}
            yield Problem("step-rate-differs", path=path, iteration=iteration, **texts)


def step_notes(source: SourceCheckpoint, config: Config, dp_size: int) -> Iterator[Problem]:
    """Yields what cannot be taken over, with the first step that will differ; see
    `step_conflicts`."""
    run = source.run
    state = continued_state(source, config)
    if run is None or run.settings is None or state is None:
        return
    saved = run.settings
    first = run.iteration + 1
    if not config.checkpoint.is_new_run and saved.data:
        samples = state.consumed_samples
        texts = {"data": saved.data, "samples": samples, "first": first}
        yield Problem("step-data-other", path=source.path, **texts)
    if _settings_of(source, config) is None or config.checkpoint.override_opt_param_scheduler:
        return
    batch = saved.options.get(BATCH)
    size = schedules.plan(config, state, dp_size).global_batch_size
    if batch not in (None, size):
        texts = {"saved": batch, "now": size, "first": first}
        yield Problem("step-batch-other", path=source.path, **texts)
    if saved.schedule is not None and saved.schedule_name and size:
        differing = _first_difference(saved, config, state, first, dp_size)
        if differing is not None:
            name = saved.schedule_name
            rate = saved.schedule(differing)
            now = _rate_at(config, state, differing - run.iteration, dp_size)
            texts = {"name": name, "saved": f"{rate:.9g}", "now": f"{now:.9g}"}
            hint = _hint(saved)
            yield Problem(
                "step-schedule-other", path=source.path, first=differing, hint=hint, **texts
            )


def source_iteration(source: SourceCheckpoint) -> int:
    """Iteration of the run that saved a checkpoint."""
    assert source.run is not None
    return source.run.iteration


def _settings_of(source: SourceCheckpoint, config: Config) -> StepSettings | None:
    """The settings of the run whose optimizer is continued; None if it is not."""
    run = source.run
    is_without = config.checkpoint.no_load_optim or not source.optimizer
    if run is None or is_without or continued_state(source, config) is None:
        return None
    return run.settings


def _batch_conflicts(source: SourceCheckpoint, config: Config) -> Iterator[Problem]:
    """Compares the samples of the run, of its steps, with the tokens of one of its ranks."""
    run = source.run
    if run is None or run.settings is None or continued_state(source, config) is None:
        return
    tokens = run.settings.tokens_of_rank
    total = (run.consumed_samples or 0) * config.model.seq_length
    if tokens and (total < tokens or total % tokens):
        texts = {"steps": run.iteration, "tokens": tokens, "total": total}
        yield Problem("step-batch-differs", BATCH, "seq_length", path=source.path, **texts)


def _weight_conflicts(
    source: SourceCheckpoint, saved: StepSettings, config: Config
) -> Iterator[Problem]:
    """Compares the rates of single weights."""
    from megatron_ds.conversion.trainers.runs.weight_rates import differing_weights, param_groups

    if not saved.lr:
        return
    settings = source.settings
    model = dataclasses.replace(config.model, vocab_size=settings.model.vocab_size)
    differing = [*differing_weights(saved, model, settings.moe, config.optimizer)]
    if not differing:
        return
    name, before, now = differing[0]
    bare = dataclasses.replace(
        config.optimizer, param_group=None, embedding_weight_decay=None, decoupled_lr=None
    )
    groups = param_groups(saved, model, settings.moe, bare)
    flags = _words("param_group", groups) if groups else "none of these flags"
    texts = {"name": name, "others": len(differing) - 1, "flags": flags}
    rates = {"saved": _shown(before), "now": _shown(now)}
    yield Problem("step-weights-differ", *GROUPS, path=source.path, **texts, **rates)


def _words(name: str, value: Any) -> str:
    """A flag as a shell takes it."""
    flag, *words = as_flag(name, value).split()
    return f"{flag} {shlex.join(words)}"


def _shown(rates: Sequence[float]) -> str:
    return " and ".join(f"{value:.9g}" for value in rates)


def _hint(saved: StepSettings) -> str:
    """What gives the schedule of the run, as far as it is known."""
    if saved.schedule_flags:
        return f". {saved.schedule_flags} has the rates of {saved.schedule_name}"
    if saved.schedule_name:
        return f". No flags have the rates of {saved.schedule_name}"
    return ""


def _rate_at(config: Config, state: TrainState, steps: int, dp_size: int) -> float:
    """Learning rate of a step, counted from the state of the checkpoint; 1 is the next one."""
    size = schedules.batch_size_at(config, state.consumed_samples, state.consumed_tokens, dp_size)
    ahead = (steps - 1) * size
    shifted = dataclasses.replace(
        state,
        applied_samples=max(0, state.applied_samples + ahead),
        applied_tokens=max(0, state.applied_tokens + ahead * config.model.seq_length),
    )
    return schedules.learning_rate(config, shifted, dp_size)


def _first_difference(
    saved: StepSettings, config: Config, state: TrainState, first: int, dp_size: int
) -> int | None:
    """The first step whose rate is not that of the saved schedule."""
    from megatron_ds.conversion.trainers.runs.weight_rates import options_differ

    schedule = saved.schedule
    assert schedule is not None

    def differs(step: int) -> bool:
        rate = _rate_at(config, state, step - first + 1, dp_size)
        return options_differ(float(schedule(step)), rate)

    last = first - 1 - state.iteration + schedules.total_iterations(config, dp_size, state)
    stride = max(1, (last - first) // COMPARED)
    checked = first - 1
    for step in [*range(first, last, stride), last]:
        if differs(step):
            return next(one for one in range(checked + 1, step + 1) if differs(one))
        checked = step
    return None
