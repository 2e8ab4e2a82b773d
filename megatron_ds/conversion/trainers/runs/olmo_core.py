"""The run that saved a checkpoint of OLMo-core.

    stepN/model_and_optim     optim.state.WEIGHT.exp_avg, optim.param_groups.0.lr
    stepN/train/rank0.pt      global_step, global_train_tokens_seen, max_steps, data_loader, rng
    stepN/config.json         train_module: optim, scheduler, max_grad_norm, z_loss_multiplier

The rate `lr` is that of the last step. Facts: ai2-olmo-core 3.0.0, `train/trainer.py`,
`train/train_module`, `optim`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import Problem, user_error
from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values
from megatron_ds.conversion.safe_unpickle import read_foreign
from megatron_ds.conversion.source import ReadOptions, SavedRun, SourceCheckpoint
from megatron_ds.conversion.step_settings import StepSettings
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.olmo_core_experts import (
    BALANCED,
    StepsOfExperts,
    expert_matrices,
    steps_of_experts,
)
from megatron_ds.conversion.trainers.open_model import file_in
from megatron_ds.conversion.trainers.runs.adam_states import (
    AdamOfRun,
    TheirAdam,
    adam_of_run,
    with_run,
)
from megatron_ds.conversion.trainers.runs.distributed_adam import read_adam
from megatron_ds.conversion.trainers.runs.olmo_schedules import Schedule, schedule_of
from megatron_ds.engine.states.state_reader import TensorReader

OPTIMIZER = "optim"
TRAIN = "train/rank0.pt"
"""State of the trainer on its first rank; the counters are the same on all."""
CLASS = "_CLASS_"
ADAMS = ("AdamWConfig", "AdamConfig", "SkipStepAdamWConfig")
SKIPPING = "SkipStepAdamWConfig"
DATA = (
    "OLMo-core shuffles its sequences by its own generator, and predicts one token less of each, "
    "because the last one has no label"
)
WITHOUT = "it has no optimizer states"
UNREAD = f"it has no {TRAIN}, which has the progress of the run"


def with_olmo_core_run(
    source: SourceCheckpoint,
    folder: DcpFolder,
    names: TrainerNames,
    recorded: Mapping[str, Any],
    options: ReadOptions,
) -> SourceCheckpoint:
    """A model with the run that trained it, as far as the files have it.

    Args:
        source: The model, whose path is the folder of the step.
        folder: The state dict.
        names: Names of its weights.
        recorded: The contents of config.json.
        options: What is read.

    Raises:
        UserError: If files are damaged, the optimizer's states are incomplete, or of another
            optimizer than Adam.
    """
    if not (options.optimizer or options.run):
        return source
    path = source.path
    with malformed_values(path / "config.json"):
        module = recorded.get("train_module") or {}
        _check_optimizer(path, module.get("optim") or {})
        experts = _steps_of_experts(source.settings, recorded, module)
    theirs = read_adam(folder, OPTIMIZER) if options.optimizer and not experts.lacking else None
    if theirs is not None:
        theirs = _with_matrices(theirs, source.settings)
    if not (path / TRAIN).is_file():
        if theirs is None:
            return source
        adam = adam_of_run(path, source.settings, names, theirs)
        run = SavedRun(adam.steps, None, None, adam.steps, None)
        return dataclasses.replace(source, run=run, unread=UNREAD)
    length = int(source.settings.model.seq_length)
    file = file_in(path, TRAIN)
    with malformed_values(file):
        state = read_foreign(file)
        step = int(state["global_step"])
        tokens = int(state["global_train_tokens_seen"])
        last = None if state.get("max_steps") is None else int(state["max_steps"])
    samples = tokens // length
    if theirs is None:
        run = SavedRun(step, samples, None, None, None, settings=StepSettings(data=DATA))
        return dataclasses.replace(source, run=run, unread=experts.lacking or WITHOUT)
    adam = adam_of_run(path, source.settings, names, theirs)
    _check_steps(path, adam, step)
    with malformed_values(path / "config.json"):
        schedule = schedule_of(
            module.get("scheduler"), adam.settings.options.get("lr", 0.0), last, step, tokens
        )
        settings = _settings(adam, module, recorded, schedule, step, length)
        options_of_steps = {**settings.options, **experts.options}
        settings = dataclasses.replace(settings, options=options_of_steps)
    run = SavedRun(step, samples, None, adam.steps, None, settings=settings)
    source = with_run(source, adam, run)
    return dataclasses.replace(source, notes=(*source.notes, *_notes(path, module)))


def _steps_of_experts(
    settings: ModelSettings, recorded: Mapping[str, Any], module: Mapping[str, Any]
) -> StepsOfExperts:
    """The options of the steps of experts; of a loss that balances micro-batches, also their size.

    Raises:
        KeyError, TypeError, ValueError: If the recorded values are malformed.
    """
    if not settings.moe.is_used:
        return StepsOfExperts({})
    steps = steps_of_experts(recorded["model"])
    tokens = module.get("rank_microbatch_size")
    if tokens and steps.options.get("moe_router_load_balancing_type") == BALANCED["local_batch"]:
        size = int(tokens) // int(settings.model.seq_length)
        return steps._replace(options={**steps.options, "micro_batch_size": size})
    return steps


def _with_matrices(theirs: TheirAdam, settings: ModelSettings) -> TheirAdam:
    """The states with those of experts as a matrix for each expert."""
    states: dict[str, dict[str, TensorReader]] = {}
    for name, values in theirs.states.items():
        shaped = {key: expert_matrices({name: tensor}, settings) for key, tensor in values.items()}
        states[name] = {key: tensors[name] for key, tensors in shaped.items()}
    return dataclasses.replace(theirs, states=states)


def _check_optimizer(path: Path, optimizer: Mapping[str, Any]) -> None:
    """Refuses another optimizer than Adam, and one that does not count its steps."""
    name = str(optimizer.get(CLASS, "")).rpartition(".")[2]
    if name and name not in ADAMS:
        raise user_error("foreign-optimizer-other", path=path, states=name)
    if optimizer.get("step_increment_bugfix") is False:
        parts = "step_increment_bugfix False, with which no moment is corrected"
        raise user_error("foreign-adam-lacking", path=path, parts=parts)


def _check_steps(path: Path, adam: AdamOfRun, step: int) -> None:
    """Compares the steps of the optimizer and the trainer.

    A save before the first step, as OLMo-core's of step 0, counts one step of Adam more: torch then
    creates the states by a step with gradients of zero. Skipped steps are not counted.
    """
    if adam.steps > step + 1 or (step and not adam.steps):
        texts = {"first": "the optimizer", "few": adam.steps, "last": "the trainer", "many": step}
        raise user_error("foreign-steps-differ", path=path, **texts)


def _settings(
    adam: AdamOfRun,
    module: Mapping[str, Any],
    recorded: Mapping[str, Any],
    schedule: Schedule,
    step: int,
    length: int,
) -> StepSettings:
    options = dict(adam.settings.options)
    if module:
        options["clip_grad"] = float(module.get("max_grad_norm") or 0.0)
        options["z_loss_coeff"] = float(module.get("z_loss_multiplier") or 0.0)
    batch = (recorded.get("data_loader") or {}).get("global_batch_size")
    if isinstance(batch, int) and batch % length == 0:
        options["global_batch_size"] = batch // length
    rates = {} if adam.rate is None or not step else {step: adam.rate}
    return dataclasses.replace(
        adam.settings,
        options=options,
        rates=rates,
        schedule=schedule.rate,
        schedule_name=schedule.name,
        schedule_flags=schedule.flags,
        data=DATA,
    )


def _notes(path: Path, module: Mapping[str, Any]) -> list[Problem]:
    optimizer = module.get("optim") or {}
    if str(optimizer.get(CLASS, "")).rpartition(".")[2] != SKIPPING:
        return []
    sigma = optimizer.get("sigma_factor", 6)
    window = optimizer.get("rolling_interval_length", 128)
    return [Problem("olmo-core-skips", path=path, sigma=sigma, window=window)]
